"""The commands `flux-megatron tune` and `tune-experts`: they measure plans, and keep them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from flux_megatron import option_values


def tune(
    config: Annotated[Path | None, typer.Option(help="A training run, as of train")] = None,
    suite: Annotated[str | None, typer.Option(help="gpt3-175b or llama2-70b, instead")] = None,
    tp: Annotated[
        int | None, typer.Option(min=2, help="Ranks of the suite; default 4, on the CPU 2")
    ] = None,
    M: Annotated[
        str | None,
        typer.Option("--M", help="Rows of the suite's problems; default 8192,4096,2048, CPU 64"),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of the suite's problems; default bfloat16, CPU float32")
    ] = None,
    scale: Annotated[
        int | None,
        typer.Option(min=1, help="Divide the suite's widths; default 1, on the CPU 512"),
    ] = None,
    sequence_parallel: Annotated[
        bool, typer.Option(help="Of the suite; without it GEMM+AR is tuned")
    ] = True,
    connections: Annotated[
        int, typer.Option(min=0, help="CUDA_DEVICE_MAX_CONNECTIONS to tune for; 0: unset")
    ] = 1,
    beside: Annotated[
        bool, typer.Option("--beside", help="Also beside NCCL, for data and pipeline parallelism")
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Measure what is known too")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder of entries to ship, as configs/tuned/h200")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda or cpu; default: of the config, else cuda")
    ] = None,
) -> None:
    """Measure which plan is the fastest for each problem of a model, and keep it for later runs."""
    from flux_megatron.bench import tune_request

    request = tune_request.Request(
        config, suite, tp, M, dtype, scale, sequence_parallel, beside, device
    )
    problems, name = request.problems()
    if out is not None:
        option_values.folder("--out", out)
    if "RANK" not in os.environ:
        ranks, on = problems[0].world_size, problems[0].device
        raise typer.Exit(tune_request.start(ranks, on, connections, sys.argv[1:]))
    from flux_megatron.bench import tune as tuning

    tuning.tune(problems, again, out, name)


def tune_experts(
    hidden: Annotated[int, typer.Option(min=1, help="Width of a token")],
    ffn: Annotated[int, typer.Option(min=1, help="Width of an expert")],
    experts: Annotated[int, typer.Option(min=1, help="Of all ranks")],
    topk: Annotated[int, typer.Option(min=1, help="Experts of a token")],
    tokens: Annotated[int, typer.Option(min=1, help="Of a micro-batch, on each rank")],
    ep: Annotated[int, typer.Option(help="Expert-parallel ranks, at least 2")] = 2,
    gated: Annotated[bool, typer.Option("--gated", help="The first GEMM is twice as wide")] = False,
    dtype: Annotated[str, typer.Option(help="Data type")] = "bfloat16",
    connections: Annotated[
        int, typer.Option(min=0, help="CUDA_DEVICE_MAX_CONNECTIONS to tune for; 0: unset")
    ] = 1,
    again: Annotated[bool, typer.Option("--again", help="Measure what is known too")] = False,
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
) -> None:
    """Measure which strategy is the fastest for a model's experts, and keep it for later runs."""
    from flux_megatron.bench import machine, tune_request
    from flux_megatron.bench import tune_experts as of_experts

    option_values.names("--dtype", dtype, tune_request.DTYPES)
    machine.ranks(device, ep, "--device cpu with a small model", option="--ep", least=2)
    wanted = of_experts.problems(hidden, ffn, experts, topk, tokens, ep, dtype, device, gated)
    if "RANK" not in os.environ:
        raise typer.Exit(tune_request.start(ep, device, connections, sys.argv[1:]))
    of_experts.run(wanted, again)
