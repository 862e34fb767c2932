"""The command `flux-megatron generate`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from flux_megatron import command_errors, option_values


def generate(
    checkpoint: Annotated[
        Path, typer.Option(help="Folder of a training run, or its checkpoints/step_N")
    ],
    prompt: Annotated[str | None, typer.Option(help="The text to go on from")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="File with a prompt a line, decoded together; at most 64")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to decode for each prompt")] = 32,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from so many; 0: from all")] = 0,
    seed: Annotated[int, typer.Option(help="Of what is drawn")] = 1234,
    tp: Annotated[
        int | None, typer.Option(help="Tensor-parallel ranks; default: the checkpoint's")
    ] = None,
    layers: Annotated[str, typer.Option(help="flux or stock")] = "flux",
    compare: Annotated[
        bool, typer.Option("--compare", help="Decode by stock layers too; fail where tokens differ")
    ] = False,
    eager: Annotated[bool, typer.Option("--eager", help="On GPUs: no CUDA graph")] = False,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu")] = "auto",
    json_: Annotated[Path | None, typer.Option("--json", help="Write everything there")] = None,
) -> None:
    """Decode text with a GPT of `flux-megatron train`, over tensor-parallel ranks."""
    command_errors.require("generate", "megatron.core", "numpy", "psutil")
    from flux_megatron.lab.generate import launcher, request
    from flux_megatron.lab.train.config import ConfigError

    if "RANK" in os.environ:
        raise ConfigError("RANK is set: generate starts its own ranks, run it without torchrun")
    if (prompt is None) == (prompts is None):
        raise ConfigError("one of --prompt and --prompts expected")
    if layers not in ("flux", "stock") or (compare and layers != "flux"):
        also = ", flux with --compare" if compare else ""
        raise ConfigError(f"--layers {layers} given, flux or stock expected{also}")
    if device not in ("auto", "cuda", "cpu"):
        raise ConfigError(f"--device {device} given, auto, cuda or cpu expected")
    arms: Any = ("flux", "stock") if compare else (layers,)
    config, folder = request.trained(option_values.absolute(checkpoint), tp, device)
    wanted = request.Request(
        checkpoint=folder,
        prompts=request.read_prompts(prompts) if prompts else (str(prompt),),
        tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        arms=arms,
        graph=not eager,
    )
    code = launcher.generate(config, wanted, json_)
    raise typer.Exit(code)
