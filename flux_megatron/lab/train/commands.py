"""The command `flux-megatron train`."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from flux_megatron import command_errors, config_files, option_values
from flux_megatron.versions import megatron_core

Texts = list[str] | None


def train(
    config: Annotated[Path, typer.Option(help="YAML file, or demo or h200, which we ship")],
    out: Annotated[Path | None, typer.Option(help="Folder of this run; default out/CONFIG")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of text files")] = None,
    set_: Annotated[Texts, typer.Option("--set", metavar="KEY=VALUE", help="Any other key")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Also train stock layers")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in OUT")] = False,
) -> None:
    """Pretrain a GPT with megatron-core on our layers."""
    command_errors.require("train", "megatron.core", "numpy", "psutil")
    megatron_core.check()
    from flux_megatron.lab.train import compare as comparison
    from flux_megatron.lab.train import config as configs
    from flux_megatron.lab.train import ranks

    overrides: dict[str, Any] = config_files.overrides(set_ or [], "train.lr=0.001")
    flags = {"parallel.tp": tp, "train.steps": steps, "data.path": data}
    overrides |= {key: value for key, value in flags.items() if value is not None}
    if overrides.get("data.path") is not None:
        overrides["data.path"] = option_values.absolute(str(overrides["data.path"]))
    run = configs.load(config, overrides)
    folder = option_values.absolute(out or Path("out", config.stem))
    runs = [(run, folder)]
    if compare:
        runs = [(arm, folder / arm.layers) for arm in comparison.arms_of(run)]
    under_torchrun, logs = "RANK" in os.environ, folder / "logs"
    world_size, on_gpu = ranks.placement(run)
    if under_torchrun:
        world_size = int(os.environ["WORLD_SIZE"])
    if os.environ.get("RANK", "0") == "0":
        _check(runs, resume, world_size, under_torchrun)
    ranks.set_environment(run, world_size, on_gpu)
    if under_torchrun:
        finished = ranks.as_rank(_rank, run, runs, resume)
    elif not (finished := ranks.launch(_rank, run, world_size, logs, runs, resume)):
        words = [*sys.argv[1:], *["--resume"] * ("--resume" not in sys.argv)]
        typer.echo(f"to go on: {shlex.join(['flux-megatron', *words])}", err=True)
    if not finished:
        raise typer.Exit(ranks.INTERRUPTED)
    if compare and os.environ.get("RANK", "0") == "0":
        raise typer.Exit(0 if comparison.conclude(folder, [arm for _, arm in runs]) else 1)


def _check(runs: list[Any], resume: bool, world_size: int, under_torchrun: bool) -> None:
    """`BadInput` for all that can be known to fail before a rank starts."""
    from flux_megatron.lab.train import ranks, run_folder, text

    config, first = runs[0]
    config.microbatches(world_size)
    ranks.wait_bound_s()
    if not resume:
        text.files(config)
    for one, out in runs:
        begun = (out / run_folder.CONFIG).is_file()
        # a job that is queued again resumes, also where its first start did not come so far
        run_folder.check(one, out, resume and (begun or (out == first and not under_torchrun)))


def _rank(_: Any, runs: list[Any], resume: bool, device: Any) -> bool:
    from flux_megatron.lab.train import loop

    return all(loop.train(config, out, resume, device) for config, out in runs)
