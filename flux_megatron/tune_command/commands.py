"""The command `flux-megatron tune`: it measures plans, and keeps them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flux_megatron import option_values

if TYPE_CHECKING:
    from flux_megatron.tune_command.widths import Widths


def tune(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGS...", help="Megatron's own, after --, instead of a suite"),
    ] = None,
    suite: Annotated[str | None, typer.Option(help="gpt3-175b or llama2-70b")] = None,
    tp: Annotated[
        int | None,
        typer.Option(min=2, help="Ranks of the suite or model; default: all GPUs, CPU 2"),
    ] = None,
    M: Annotated[
        str | None,
        typer.Option("--M", help="Rows of all problems; default 8192,4096,2048, on the CPU 64"),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of all problems; default bfloat16, on the CPU float32")
    ] = None,
    scale: Annotated[
        int | None,
        typer.Option(min=1, help="Divide the suite's widths; default 1, on the CPU 512"),
    ] = None,
    sequence_parallel: Annotated[bool, typer.Option(help="Without it GEMM+AR is tuned")] = True,
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
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    hidden: Annotated[int | None, typer.Option(min=1, help="Width of a token")] = None,
    ffn: Annotated[int | None, typer.Option(min=1, help="Width between fc1 and fc2")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Attention heads of the model")] = None,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="Its key-value heads; default: as many")
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(min=1, help="Width of a head; default: hidden / heads")
    ] = None,
    vocab: Annotated[
        int | None, typer.Option(min=1, help="Padded vocabulary; default: no output layer")
    ] = None,
    swiglu: Annotated[bool, typer.Option("--swiglu", help="The model's fc1 is doubled")] = False,
) -> None:
    """Measure which plan is the fastest for each problem of a model, and keep it for later runs."""
    from flux_megatron.tune_command import request

    widths = _widths(hidden, ffn, heads, kv_heads, head_dim, swiglu, None if arguments else vocab)
    wanted = request.Request(
        suite, tp, M, dtype, scale, sequence_parallel, beside, device, widths,
        arguments or (), vocab,
    )  # fmt: skip
    problems, name = wanted.problems()
    if out is not None:
        option_values.folder("--out", out)
    if "RANK" not in os.environ:
        ranks, on = problems[0].world_size, problems[0].device
        raise typer.Exit(request.start(ranks, on, cuda_max_connections, sys.argv[1:]))
    from flux_megatron.tune_command import measure

    measure.tune(problems, again, out, name)


def _widths(
    hidden: int | None, ffn: int | None, heads: int | None, kv_heads: int | None,
    head_dim: int | None, swiglu: bool, vocab: int | None,
) -> Widths | None:  # fmt: skip
    """None if none is given."""
    from flux_megatron.errors import BadInput
    from flux_megatron.tune_command.widths import Widths

    if not any((hidden, ffn, heads, kv_heads, head_dim, swiglu, vocab)):
        return None
    needed = {"--hidden": hidden, "--ffn": ffn, "--heads": heads}
    if lacking := [name for name, size in needed.items() if size is None]:
        raise BadInput(f"a model's widths need {', '.join(lacking)} too")
    return Widths(hidden or 0, ffn or 0, heads or 0, kv_heads, head_dim, swiglu, vocab)
