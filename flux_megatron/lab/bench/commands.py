"""The command that measures: `flux-megatron bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flux_megatron import option_values

app = typer.Typer(invoke_without_command=True)
Tp = Annotated[int | None, typer.Option(min=1, help="Ranks; default: all GPUs, on the CPU 2")]
Device = Annotated[str, typer.Option(help="cuda or cpu")]
TimeLimit = Annotated[float | None, typer.Option(help="Seconds; start no further case after them")]
Multicast = Annotated[bool, typer.Option("--allow-multicast", help="Allow NVLink multicast")]
Commit = Annotated[str, typer.Option(help="Of the sources, where they have no .git")]
Size = int | None
Text = str | None
LOAD = "Also beside collectives of another communicator"
LOADS = "Which: some of all_reduce,all_gather,reduce_scatter"
ROUND = "Every candidate runs once a round"


@app.callback()
def bench(
    context: typer.Context,
    suite: Annotated[Text, typer.Option(help="Default gpt3-175b,llama2-70b")] = None,
    pattern: Annotated[Text, typer.Option(help="Default ag_gemm,gemm_rs,backward")] = None,
    M: Annotated[Text, typer.Option("--M", help="Rows; default 64 to 8192, on the CPU 64")] = None,
    shapes: Annotated[str, typer.Option(help="Instead: one rank's, 'gemm_rs 1536x8192x2048'")] = "",
    all_plans: Annotated[bool, typer.Option("--all-plans", help="Also all plans of tune")] = False,
    out: Annotated[Path, typer.Option(help="Folder of rows.jsonl, appended to")] = Path("bench"),
    candidates: Annotated[str, typer.Option(help="Only these and the baselines")] = "",
    rounds: Annotated[Size, typer.Option(min=1, help=f"{ROUND}; default 12, on the CPU 2")] = None,
    beside: Annotated[bool, typer.Option("--with-nccl-load", help=LOAD)] = False,
    loads: Annotated[str, typer.Option("--nccl-load", help=LOADS)] = "all_reduce",
    graphs: Annotated[bool, typer.Option("--graphs", help="Also replay CUDA graphs")] = False,
    tp: Tp = None,
    device: Device = "cuda",
    scale: Annotated[Size, typer.Option(min=1, help="Divide widths; default 1, CPU 512")] = None,
    time_limit: TimeLimit = None,
    nvls: Multicast = False,
    commit: Commit = "",
) -> None:
    """Time our operations beside NCCL and every installed peer, in one run; see CONTRIBUTING.md.

    Lists are separated by commas.
    """
    if context.invoked_subcommand is not None:
        return
    from flux_megatron.lab.bench import launch
    from flux_megatron.lab.bench import options as bench_options

    option_values.number("--time-limit", time_limit, zero=True, unit="seconds")
    options = bench_options.parsed(
        suite=suite, pattern=pattern, M=M, rounds=rounds, scale=scale, tp=tp, device=device,
        candidates=candidates, out=str(out / "rows.jsonl"), time_limit_s=time_limit, nvls=nvls,
        commit=commit, beside=beside, graphs=graphs, shapes=shapes, all_plans=all_plans,
        loads=loads,
    )  # fmt: skip
    kept = f"{options.out} has the rows of what is done; --suite, --pattern and --M choose the rest"
    launch.start(options, out, kept, "bench", "runner")


@app.command("operations")
def bench_operations(
    names: Annotated[list[str] | None, typer.Argument(help="Default: all")] = None,
    out: Annotated[Path, typer.Option(help="Folder of operations.jsonl")] = Path("bench"),
    rounds: Annotated[int, typer.Option(min=1, help=ROUND)] = 12,
    tp: Tp = None,
    device: Device = "cuda",
    time_limit: TimeLimit = None,
    nvls: Multicast = False,
    commit: Commit = "",
) -> None:
    """Time embedding_all_to_all, expert_all_to_all and expert_layers beside unfused baselines."""
    from flux_megatron import machine
    from flux_megatron.lab.bench import launch
    from flux_megatron.lab.bench.options import OPERATIONS, OperationOptions

    option_values.number("--time-limit", time_limit, zero=True, unit="seconds")
    options = OperationOptions(
        tuple(names or OPERATIONS), rounds, out=str(out / "operations.jsonl"),
        tp=machine.ranks(device, tp, "--device cpu --rounds 2"), device=device, nvls=nvls,
        time_limit_s=time_limit, commit=commit,
    )  # fmt: skip
    kept = f"{options.out} has the rows of what is done"
    launch.start(options, out, kept, "bench operations", "operations")
