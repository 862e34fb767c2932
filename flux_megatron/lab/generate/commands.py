"""The command `flux-megatron generate`. Torch only in the ranks."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from flux_megatron import command_errors, option_values
from flux_megatron.errors import BadInput
from flux_megatron.lab.generate.request import Request, check_prompts
from flux_megatron.versions import megatron_core


def generate(
    checkpoint: Annotated[Path, typer.Option(help="A training run, or its checkpoints/step_N")],
    prompt: Annotated[list[str], typer.Option(help="To go on from; several go together")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to decode for each prompt")] = 32,
    tp: Annotated[int | None, typer.Option(help="Ranks; default: the checkpoint's")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Also by stock layers")] = False,
    json_: Annotated[Path | None, typer.Option("--json", help="All of it; - for stdout")] = None,
) -> None:
    """Decode text with a GPT of `flux-megatron train`, over tensor-parallel ranks."""
    command_errors.require("generate", "megatron.core", "numpy", "psutil")
    megatron_core.check()
    from flux_megatron.lab.train import ranks
    from flux_megatron.lab.train.run_folder import show

    if "RANK" in os.environ:
        raise BadInput("RANK is set: generate starts its own ranks, run it without torchrun")
    config, folder = _trained(option_values.absolute(checkpoint), tp)
    check_prompts(prompt, tokens, config.model.seq_length)
    if json_ is not None:
        option_values.json_target(json_)
    request = Request(folder, prompt, tokens, ("flux", "stock") if compare else ("flux",))
    world_size, on_gpu = ranks.placement(config)
    ranks.set_environment(config, world_size, on_gpu)
    with tempfile.TemporaryDirectory(prefix="flux_megatron-generate-") as logs:
        result = ranks.launch(_rank, config, world_size, Path(logs), request)
    if result is None:
        raise typer.Exit(ranks.INTERRUPTED)
    silent = sum(arm["silent"] for arm in result["arms"].values())
    result |= {"passed": not (silent or result.get("differences")), "prompts": prompt}
    for given, text in zip(prompt, result["arms"]["flux"]["texts"], strict=True):
        # nothing of a model's text may reach the terminal as a command
        typer.echo("".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in given + text))
    for name, arm in result["arms"].items():
        show(f"{name} layers", {key: arm[key] for key in arm if key != "texts"}, sys.stderr)
    if compare:
        gap, found = result["largest_logit_difference"], result["differences"]
        said = f"DIFFERENT: {found}" if found else "same"
        typer.echo(f"largest |logit difference|: {gap:.3e}\ntokens: {said}", err=True)
    if json_ is not None:
        option_values.write_json(json_, result)
    raise typer.Exit(0 if result["passed"] else 1)


def _trained(folder: Path, tp: int | None) -> tuple[Any, Path]:
    """How to build the model of a checkpoint on `tp` ranks, None for as many as it was trained on,
    and the folder of the checkpoint: `folder`, or the newest one of the run in `folder`.
    """
    from pydantic import ValidationError

    from flux_megatron.lab.train import config, run_folder
    from flux_megatron.launch import schema

    is_step = folder.name.startswith("step_")
    trained = run_folder.recorded(folder.parent.parent if is_step else folder, "--checkpoint")
    found = folder if is_step else run_folder.latest(folder)
    if found is None or not found.is_dir():
        raise BadInput(f"--checkpoint {folder} given, but there is no checkpoint (yet)")
    tp = trained.parallel.tp if tp is None else tp
    changed = trained.model_dump() | {"strategy": "auto", "layers": "flux"}
    changed["parallel"] |= {"tp": tp, "world_size": tp, "sequence_parallel": False}
    try:
        return config.TrainConfig.model_validate(changed), found
    except ValidationError as error:
        raise BadInput(f"--tp {tp} given: {schema.said(error)}") from None


def _rank(config: Any, request: Request, device: Any) -> dict[str, Any]:
    from flux_megatron.lab.generate import decode

    return decode.decode(config, request, device)
