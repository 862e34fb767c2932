"""The parent of the ranks that decode: starts them in a folder of their own, and judges."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from flux_megatron import option_values
from flux_megatron.lab.generate.request import REQUEST, Request
from flux_megatron.lab.train import checkpoint_files, launcher, run_folder
from flux_megatron.lab.train.config import ConfigError, TrainConfig

INTERRUPTED = 130


def generate(config: TrainConfig, request: Request, json_file: Path | None) -> int:
    """Decode, show what was measured on standard error, and keep all of it in `json_file`.

    0, or 1 if the arms differ or a call silently ran without overlap, or 130 after Ctrl-C. Raises
    `RankFailure`.
    """
    request.check(config)
    checkpoint_files.check(request.checkpoint)
    if json_file is not None:
        _check_writable(json_file)
    world_size, on_gpu = launcher.placement(config)
    with tempfile.TemporaryDirectory(prefix="flux_megatron-generate-") as folder:
        out = Path(folder)
        run_folder.write_json(out / "config.json", config.model_dump(mode="json"))
        (out / REQUEST).write_text(request.model_dump_json())
        job = ["--job", "flux_megatron.lab.generate.job"]
        if launcher.run_ranks(config, out, world_size, on_gpu, job):
            return INTERRUPTED
        result = run_folder.read_json(out / "result.json")
    result["passed"] = passed(result)
    result["request"] = request.model_dump(mode="json") | {"tp": config.parallel.tp}
    console = Console(stderr=True)
    for line in report(result):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    if json_file is not None:
        option_values.write_json(json_file, result)
    return 0 if result["passed"] else 1


def _check_writable(json_file: Path) -> None:
    """`ConfigError` before anything is decoded whose result could not be kept."""
    try:
        if json_file.is_dir():
            raise IsADirectoryError(0, "a folder")
        with tempfile.TemporaryFile(dir=option_values.absolute(json_file).parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"--json {json_file} cannot be written ({error.strerror}): a file expected, in a "
            "folder that is there"
        ) from None


def passed(result: dict[str, Any]) -> bool:
    """Equal tokens, if there are two arms, and no call without overlap and without a reason."""
    silent = sum(arm["silent"] for arm in result["arms"].values())
    return not result.get("differences") and not silent


def report(result: dict[str, Any]) -> list[str]:
    """What is shown of a result, a line each."""
    lines = []
    for name, arm in result["arms"].items():
        count = sum(map(len, arm["tokens"]))
        lines.append(
            f"{name}: {count} tokens, {arm['tokens_per_s']:,.1f} tokens/s, "
            f"{arm['ms_per_step']:.2f} ms a step, prompt read in {arm['prefill_s']:.2f} s"
        )
        lines += [f"  calls: {call}: {n}" for call, n in arm["calls"].items()]
        lines += [f"  fallback: {reason}: {n}" for reason, n in arm["fallbacks"].items()]
        if arm["eligible"]:
            lines.append(f"  overlapped / eligible calls: {arm['overlapped']} / {arm['eligible']}")
        if arm["silent"]:
            lines.append(f"  silent fallbacks: {arm['silent']}")
    if "differences" in result:
        lines += [
            f"prompt {one['prompt']} differs from its token {one['token']} on: flux {one['flux']}, "
            f"{one['gap_flux']:.3e} ahead, stock {one['stock']}, {one['gap_stock']:.3e} ahead"
            for one in result["differences"]
        ]
        lines.append(f"largest |logit difference|: {result['largest_logit_difference']:.3e}")
        lines.append(f"tokens: {'DIFFERENT' if result['differences'] else 'same'}")
    return lines
