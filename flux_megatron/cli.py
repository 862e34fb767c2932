"""The command `flux-megatron`. Commands import what they need when they run: `--help` is quick."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from flux_megatron import doctor as plain_doctor
from flux_megatron import option_values
from flux_megatron.command_group import CommandGroup
from flux_megatron.generate.commands import generate
from flux_megatron.launch.commands import launch
from flux_megatron.patching.commands import app as patch_app
from flux_megatron.results.commands import results
from flux_megatron.simulate.commands import simulate
from flux_megatron.train.commands import train
from flux_megatron.version import __version__

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(patch_app, name="patch")
for command in (train, launch, results, simulate, generate):
    app.command()(command)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it, end")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error")] = False,
) -> None:
    """Tensor-parallel layers for Megatron that hide communication behind GEMMs."""


# its own parser reads the arguments: it also runs where typer is not installed
AS_THEY_ARE = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=AS_THEY_ARE)
def doctor(context: typer.Context) -> None:
    """Say what this machine has of what a training run needs; fails if none could start."""
    raise typer.Exit(plain_doctor.main(context.args))


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    script: Annotated[Path, typer.Argument(help="Such as Megatron-LM's pretrain_gpt.py")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGS...", help="Its arguments, and --flux-overlap"),
    ] = None,
    nproc_per_node: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks to start; default: one for each GPU, 2 on the CPU"),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu: try it out without GPUs")] = "cuda",
) -> None:
    """Run a Megatron-LM training script that also takes --flux-overlap; our options come before it.

    Under torchrun this is one rank of the run, otherwise it starts torchrun on this machine.
    """
    from flux_megatron.integration import bootstrap

    command = ["--device", device, str(script), *(arguments or [])]
    if "RANK" in os.environ:
        from flux_megatron.launch.__main__ import main

        main(command)
        return
    from flux_megatron.bench import machine

    machine.check_device(device)
    bootstrap.check(str(script))
    ranks = machine.ranks(
        device,
        nproc_per_node,
        "--device cpu before the script",
        option="--nproc-per-node",
        on_gpus=None,
    )
    typer.echo(f"starting torchrun with {ranks} ranks of {script}", err=True)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    torchrun += ["-m", "flux_megatron.launch", *command]
    os.execv(sys.executable, [sys.executable, *torchrun])


@app.command()
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


@app.command("tune-experts")
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


bench_app = typer.Typer(invoke_without_command=True)
app.add_typer(bench_app, name="bench")


@bench_app.callback()
def bench(
    context: typer.Context,
    suite: Annotated[
        str | None, typer.Option(help="Models; default gpt3-175b,llama2-70b, on the CPU gpt3-175b")
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(help="Default ag_gemm,gemm_rs,backward,gemm, on the CPU ag_gemm,gemm_rs"),
    ] = None,
    M: Annotated[
        str | None, typer.Option("--M", help="Rows; default 64 to 8192, on the CPU 64")
    ] = None,
    out: Annotated[Path, typer.Option(help="JSON lines, appended to")] = Path("rows.jsonl"),
    candidates: Annotated[str, typer.Option(help="Only these and the baselines")] = "",
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Every candidate runs once a round; default 12, on the CPU 2"),
    ] = None,
    beside: Annotated[
        bool, typer.Option("--beside", help="Also beside an all-reduce of another communicator")
    ] = False,
    graphs: Annotated[
        bool, typer.Option("--graphs", help="Also replay every candidate from a CUDA graph")
    ] = False,
    tp: Annotated[int | None, typer.Option(min=1, help="Ranks; default 4, on the CPU 2")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    scale: Annotated[
        int | None,
        typer.Option(min=1, help="Divide the models' widths; default 1, on the CPU 512"),
    ] = None,
    time_limit: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Start no further case after these")
    ] = None,
    nvls: Annotated[bool, typer.Option("--nvls", help="Allow NVLink multicast")] = False,
    commit: Annotated[str, typer.Option(help="Of the sources, where they have no .git")] = "",
) -> None:
    """Time our operations beside NCCL and every installed peer, in one run; see docs/measuring.md.

    Lists are separated by commas.
    """
    if context.invoked_subcommand is not None:
        return
    from flux_megatron.bench import launch
    from flux_megatron.bench import options as bench_options

    option_values.number("--time-limit", time_limit, zero=True, unit="seconds")
    options = bench_options.parsed(
        suite=suite, pattern=pattern, M=M, rounds=rounds, scale=scale, tp=tp, device=device,
        candidates=candidates, out=str(out), time_limit_s=time_limit, nvls=nvls,
        commit=commit, beside=beside, graphs=graphs,
    )  # fmt: skip
    option_values.file("--out", out)
    kept = f"{out} has the rows of what is done; --suite, --pattern and --M choose the rest"
    code = launch.start(options, kept)
    raise typer.Exit(code)


@bench_app.command("operations")
def bench_operations(
    names: Annotated[list[str] | None, typer.Argument(help="Default: all")] = None,
    out: Annotated[Path, typer.Option(help="JSON lines, appended to")] = Path("operations.jsonl"),
    only: Annotated[str, typer.Option(help="Cases whose text has this")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Every candidate runs once a round")] = 12,
    tp: Annotated[int, typer.Option(min=1, help="Ranks")] = 2,
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    time_limit: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Start no further case after these")
    ] = None,
    nvls: Annotated[bool, typer.Option("--nvls", help="Allow NVLink multicast")] = False,
    commit: Annotated[str, typer.Option(help="Of the sources, where they have no .git")] = "",
) -> None:
    """Time gemv_all_reduce, embedding_all_to_all, expert_all_to_all beside unfused baselines."""
    from flux_megatron.bench import launch, machine
    from flux_megatron.bench.operations import NAMES
    from flux_megatron.bench.operations.worker import OperationOptions

    option_values.number("--time-limit", time_limit, zero=True, unit="seconds")
    options = OperationOptions(
        names=tuple(names or NAMES),
        out=str(out),
        only=only,
        rounds=rounds,
        tp=machine.ranks(device, tp, "--device cpu --rounds 2"),
        device=device,
        time_limit_s=time_limit,
        nvls=nvls,
        commit=commit,
    )
    option_values.file("--out", out)
    kept = f"{out} has the rows of what is done; --only chooses the rest"
    code = launch.start(options, kept, "flux_megatron.bench.operations.worker")
    raise typer.Exit(code)


@bench_app.command("check")
def bench_check(
    rows: Annotated[list[Path], typer.Argument(help="Files of rows")],
    quiet: Annotated[bool, typer.Option("--quiet", help="Only what is not met")] = False,
    tp: Annotated[int, typer.Option(min=1, help="Ranks of the rows that count")] = 4,
) -> None:
    """Hold rows against the targets: every target with met, missed or missing; fails unless all are
    met. Rows of operations are asked for where there are some.
    """
    from flux_megatron.bench import check, records
    from flux_megatron.bench.operations import check as operations_check

    of_layers, of_tables = records.load_all(rows)
    verdicts: list[check.Verdict | operations_check.Verdict] = []
    if of_layers or not of_tables:
        verdicts += check.check(of_layers, tp)
    verdicts += operations_check.check(of_tables, tp)
    for verdict in verdicts:
        if not quiet or verdict.outcome.verdict != check.MET:
            typer.echo(str(verdict))
    typer.echo(check.summary(verdicts) if verdicts else f"no row of {tp} ranks counts")
    met = bool(verdicts) and all(v.outcome.verdict == check.MET for v in verdicts)
    raise typer.Exit(0 if met else 1)


@app.command()
def trace(
    out: Annotated[Path, typer.Option(help="Folder of trace.json, timeline.png, summary.json")],
    layer: Annotated[str, typer.Option(help="column or row")] = "column",
    M: Annotated[int | None, typer.Option("--M", min=1, help="Rows of x")] = None,
    N: Annotated[int | None, typer.Option("--N", min=1, help="Columns of y")] = None,
    K: Annotated[int | None, typer.Option("--K", min=1, help="Columns of x")] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Ranks; default 4, on the CPU 2")] = None,
    strategy: Annotated[str, typer.Option(help="auto, or one for every call")] = "auto",
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    waits: Annotated[bool, typer.Option("--waits", help="Record the waits in kernels")] = False,
    nvls: Annotated[bool, typer.Option("--nvls", help="Allow NVLink multicast")] = False,
) -> None:
    """Run one layer, forward and backward, and show what was hidden behind its GEMMs."""
    from flux_megatron.bench import launch, machine
    from flux_megatron.bench.trace.options import TraceOptions, sizes

    options = TraceOptions(
        out=str(out),
        layer=layer,
        **sizes(layer, device, M, N, K),
        tp=machine.ranks(device, tp, "--device cpu"),
        strategy=strategy,
        device=device,
        waits=waits,
        nvls=nvls,
    )
    option_values.folder("--out", out)
    kept = f"nothing is in {out}: the same command starts again"
    code = launch.start(options, kept, "flux_megatron.bench.trace.worker")
    raise typer.Exit(code)


@app.command()
def patterns(
    tp: Annotated[int, typer.Option(min=1, help="Ranks of the problem that is asked about")] = 4,
) -> None:
    """Show which strategies can run which patterns on this machine, forward and backward."""
    from rich.console import Console

    if sys.stderr.isatty():
        typer.echo("asking every strategy; torch and Triton take seconds to load", err=True)
    from flux_megatron.bench import patterns as page

    Console().print(page.table(tp))


@app.command()
def plot(
    rows: Annotated[list[Path], typer.Argument(help="Files of rows")],
    out: Annotated[Path, typer.Option(help="Folder of plots; the page goes beside it")],
) -> None:
    """Draw rows, and write the page OUT.md with the plots and the tables."""
    from flux_megatron.bench import records

    loaded = records.load_layers(rows)
    option_values.folder("--out", out)
    option_values.file("--out", out.with_suffix(".md"))
    typer.echo(f"drawing {len(loaded)} rows", err=True)
    from flux_megatron.bench import page, plots

    files = plots.draw(loaded, out)
    page.write(out, files, loaded, rows)
    typer.echo(f"wrote {out.with_suffix('.md')} and {len(files)} plots in {out}")


@app.command()
def reliability(
    rows: Annotated[list[Path], typer.Argument(help="Files of rows")],
    out: Annotated[Path, typer.Option(help="The page")],
) -> None:
    """Write the page of faults, of calls beside held SMs, and of racing orders."""
    from flux_megatron.bench import reliability as page

    text = page.text(out, rows)
    option_values.file("--out", out)
    out.write_text(text)
    typer.echo(f"wrote {out}")


if __name__ == "__main__":
    app(prog_name="flux-megatron")
