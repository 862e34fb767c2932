"""The command `flux-megatron tune`: it measures plans, and keeps them."""

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
        int | None, typer.Option(min=2, help="Ranks of the suite; default: all GPUs, on the CPU 2")
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
    cuda_max_connections: Annotated[
        int, typer.Option(min=0, help="CUDA_DEVICE_MAX_CONNECTIONS to tune for; 0: unset")
    ] = 1,
    beside: Annotated[
        bool,
        typer.Option(
            "--with-nccl-load", help="Also beside NCCL, for data and pipeline parallelism"
        ),
    ] = False,
    again: Annotated[bool, typer.Option("--force", help="Measure what is known too")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder of entries to ship, as configs/tuned/h200")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda or cpu; default: of the config, else cuda")
    ] = None,
    experts: Annotated[
        int | None,
        typer.Option(min=1, help="Instead: strategies for so many experts, of all ranks"),
    ] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Width of an expert's token")] = None,
    ffn: Annotated[int | None, typer.Option(min=1, help="Width of an expert")] = None,
    topk: Annotated[int | None, typer.Option(min=1, help="Experts of a token")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Of a micro-batch, on each expert-parallel rank")
    ] = None,
    ep: Annotated[int, typer.Option(help="Expert-parallel ranks, at least 2")] = 2,
    gated: Annotated[
        bool, typer.Option("--gated", help="An expert's first GEMM is twice as wide")
    ] = False,
) -> None:
    """Measure which plan is the fastest for each problem of a model, and keep it for later runs."""
    from flux_megatron.lab.bench import tune_request

    if experts is not None:
        sizes = {"--hidden": hidden, "--ffn": ffn, "--topk": topk, "--tokens": tokens}
        _tune_experts(
            experts, sizes, ep, gated, dtype or "bfloat16", device or "cuda", again,
            cuda_max_connections,
        )  # fmt: skip
        return

    request = tune_request.Request(
        config, suite, tp, M, dtype, scale, sequence_parallel, beside, device
    )
    problems, name = request.problems()
    if out is not None:
        option_values.folder("--out", out)
    if "RANK" not in os.environ:
        ranks, on = problems[0].world_size, problems[0].device
        raise typer.Exit(tune_request.start(ranks, on, cuda_max_connections, sys.argv[1:]))
    from flux_megatron.lab.bench import tune as tuning

    tuning.tune(problems, again, out, name)


def _tune_experts(
    experts: int, sizes: dict[str, int | None], ep: int, gated: bool, dtype: str, device: str,
    again: bool, cuda_max_connections: int,
) -> None:  # fmt: skip
    from flux_megatron import machine
    from flux_megatron.errors import BadInput
    from flux_megatron.lab.bench import tune_experts as of_experts
    from flux_megatron.lab.bench import tune_request

    if lacking := [name for name, size in sizes.items() if size is None]:
        raise BadInput(f"--experts needs {', '.join(lacking)} too")
    hidden, ffn, topk, tokens = (size or 0 for size in sizes.values())
    option_values.names("--dtype", dtype, tune_request.DTYPES)
    machine.ranks(device, ep, "--device cpu with a small model", option="--ep", least=2)
    wanted = of_experts.problems(hidden, ffn, experts, topk, tokens, ep, dtype, device, gated)
    if "RANK" not in os.environ:
        raise typer.Exit(tune_request.start(ep, device, cuda_max_connections, sys.argv[1:]))
    of_experts.run(wanted, again)
