"""The command `flux-megatron`. Commands import what they need when they run: `--help` is quick."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from flux_megatron import doctor as plain_doctor
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
        int | None, typer.Option(help="Ranks to start; default: one for each GPU, 2 on the CPU")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu: try it out without GPUs")] = "cuda",
) -> None:
    """Run a Megatron-LM training script that also takes --flux-overlap; our options come before it.

    Under torchrun this is one rank of the run, otherwise it starts torchrun on this machine.
    """
    command = ["--device", device, str(script), *(arguments or [])]
    if "RANK" in os.environ:
        from flux_megatron.launch.__main__ import main

        main(command)
        return
    import torch

    ranks = nproc_per_node or (2 if device == "cpu" else torch.cuda.device_count())
    if not ranks:
        raise typer.BadParameter("no GPU found: --device cpu tries it without")
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    torchrun += ["-m", "flux_megatron.launch", *command]
    os.execv(sys.executable, [sys.executable, *torchrun])


@app.command()
def tune(
    config: Annotated[Path | None, typer.Option(help="A training run, as of train")] = None,
    suite: Annotated[str | None, typer.Option(help="gpt3-175b or llama2-70b, instead")] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of the suite")] = 4,
    M: Annotated[str, typer.Option("--M", help="Rows of the suite's problems")] = "8192,4096,2048",
    dtype: Annotated[str, typer.Option(help="Data type of the suite's problems")] = "bfloat16",
    scale: Annotated[int, typer.Option(help="Divide the suite's widths, to try it out")] = 1,
    sequence_parallel: Annotated[
        bool, typer.Option(help="Of the suite; without it GEMM+AR is tuned")
    ] = True,
    connections: Annotated[
        int, typer.Option(help="CUDA_DEVICE_MAX_CONNECTIONS to tune for; 0: unset")
    ] = 1,
    beside: Annotated[
        bool, typer.Option("--beside", help="Also beside NCCL, for data and pipeline parallelism")
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Measure what is known too")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder of entries to ship, as configs/tuned/h200")
    ] = None,
) -> None:
    """Measure which plan is the fastest for each problem of a model, and keep it for later runs."""
    from flux_megatron.bench import tune as tuning
    from flux_megatron.train import config as configs
    from flux_megatron.train import launcher

    if (config is None) == (suite is None):
        raise typer.BadParameter("one of --config and --suite is needed")
    try:
        run = configs.load(config, {}) if config is not None else None
        tp = run.parallel.tp if run is not None else tp
        device = "cuda" if launcher.gpu_count() >= tp else "cpu"
        if run is not None:
            problems = tuning.problems_of_config(run, device)
        else:
            Ms = [int(rows) for rows in M.split(",")]
            problems = tuning.problems_of_suite(
                str(suite), Ms, tp, dtype, device, scale, sequence_parallel
            )
    except ValueError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    if beside:
        problems = tuning.and_beside(problems)
    if "RANK" not in os.environ:
        raise typer.Exit(tuning.start_ranks(tp, device == "cuda", connections, sys.argv[1:]))
    name = config.stem if config is not None else str(suite)
    if suite is not None and not sequence_parallel:
        name += "_all-reduced"  # beside the file of the same suite
    tuning.tune(problems, again, out, name)


bench_app = typer.Typer(invoke_without_command=True)
app.add_typer(bench_app, name="bench")


@bench_app.callback()
def bench(
    context: typer.Context,
    suite: Annotated[str, typer.Option(help="Models")] = "gpt3-175b,llama2-70b",
    pattern: Annotated[str, typer.Option(help="Patterns")] = "ag_gemm,gemm_rs,backward,gemm",
    M: Annotated[str, typer.Option("--M", help="Rows")] = "64,128,256,512,1024,2048,4096,8192",
    out: Annotated[Path, typer.Option(help="JSON lines, appended to")] = Path("rows.jsonl"),
    candidates: Annotated[str, typer.Option(help="Only these and the baselines")] = "",
    rounds: Annotated[int, typer.Option(help="Every candidate runs once a round")] = 12,
    beside: Annotated[
        bool, typer.Option("--beside", help="Also beside an all-reduce of another communicator")
    ] = False,
    graphs: Annotated[
        bool, typer.Option("--graphs", help="Also replay every candidate from a CUDA graph")
    ] = False,
    tp: Annotated[int, typer.Option(help="Ranks")] = 4,
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    scale: Annotated[int, typer.Option(help="Divide the models' widths, for the CPU")] = 1,
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
    from flux_megatron.bench.options import Options

    def words(text: str) -> tuple[str, ...]:
        return tuple(filter(None, text.split(",")))

    try:
        options = Options(
            suites=words(suite),
            patterns=words(pattern),
            Ms=tuple(map(int, words(M))),
            out=str(out),
            candidates=words(candidates),
            rounds=rounds,
            tp=tp,
            device=device,
            scale=scale,
            time_limit_s=time_limit,
            nvls=nvls,
            commit=commit,
            beside=beside,
            graphs=graphs,
        )
        options.cases()  # complains before any rank is started
        code = launch.start(options)
    except ValueError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(code)


@bench_app.command("operations")
def bench_operations(
    names: Annotated[list[str] | None, typer.Argument(help="Default: all")] = None,
    out: Annotated[Path, typer.Option(help="JSON lines, appended to")] = Path("operations.jsonl"),
    only: Annotated[str, typer.Option(help="Cases whose text has this")] = "",
    rounds: Annotated[int, typer.Option(help="Every candidate runs once a round")] = 12,
    tp: Annotated[int, typer.Option(help="Ranks")] = 2,
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    time_limit: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Start no further case after these")
    ] = None,
    nvls: Annotated[bool, typer.Option("--nvls", help="Allow NVLink multicast")] = False,
    commit: Annotated[str, typer.Option(help="Of the sources, where they have no .git")] = "",
) -> None:
    """Time gemv_all_reduce and embedding_all_to_all beside their unfused baselines."""
    from flux_megatron.bench import launch
    from flux_megatron.bench.operations import NAMES
    from flux_megatron.bench.operations.worker import OperationOptions

    try:
        options = OperationOptions(
            names=tuple(names or NAMES),
            out=str(out),
            only=only,
            rounds=rounds,
            tp=tp,
            device=device,
            time_limit_s=time_limit,
            nvls=nvls,
            commit=commit,
        )
        code = launch.start(options, "flux_megatron.bench.operations.worker")
    except ValueError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(code)


@bench_app.command("check")
def bench_check(
    rows: Annotated[list[Path], typer.Argument(help="Files of rows")],
    quiet: Annotated[bool, typer.Option("--quiet", help="Only what is not met")] = False,
    tp: Annotated[int, typer.Option(help="Ranks of the rows that count")] = 4,
) -> None:
    """Hold rows against the targets: every target with met, missed or missing; fails unless all are
    met. Rows of operations are asked for where there are some.
    """
    from flux_megatron.bench import check, records
    from flux_megatron.bench.operations import check as operations_check

    of_layers = [row for file in rows for row in records.load(file)]
    of_tables = [row for file in rows for row in records.load_tables(file)]
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
    M: Annotated[int | None, typer.Option("--M", help="Rows of x")] = None,
    N: Annotated[int | None, typer.Option("--N", help="Columns of y")] = None,
    K: Annotated[int | None, typer.Option("--K", help="Columns of x")] = None,
    tp: Annotated[int, typer.Option(help="Ranks")] = 4,
    strategy: Annotated[str, typer.Option(help="auto, or one for every call")] = "auto",
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    waits: Annotated[bool, typer.Option("--waits", help="Record the waits in kernels")] = False,
    nvls: Annotated[bool, typer.Option("--nvls", help="Allow NVLink multicast")] = False,
) -> None:
    """Run one layer, forward and backward, and show what was hidden behind its GEMMs."""
    from flux_megatron.bench import launch
    from flux_megatron.bench.trace.options import TraceOptions, sizes

    try:
        options = TraceOptions(
            out=str(out),
            layer=layer,
            **sizes(layer, device, M, N, K),
            tp=tp,
            strategy=strategy,
            device=device,
            waits=waits,
            nvls=nvls,
        )
        code = launch.start(options, "flux_megatron.bench.trace.worker")
    except ValueError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(code)


@app.command()
def patterns(
    tp: Annotated[int, typer.Option(help="Ranks of the problem that is asked about")] = 4,
) -> None:
    """Show which strategies can run which patterns on this machine, forward and backward."""
    from rich.console import Console

    from flux_megatron.bench import patterns as page

    Console().print(page.table(tp))


@app.command()
def plot(
    rows: Annotated[list[Path], typer.Argument(help="Files of rows")],
    out: Annotated[Path, typer.Option(help="Folder of plots; the page goes beside it")],
) -> None:
    """Draw rows, and write the page OUT.md with the plots and the tables."""
    from flux_megatron.bench import page, plots, records

    loaded = [row for file in rows for row in records.load(file)]
    page.write(out, plots.draw(loaded, out), loaded, rows)


@app.command()
def reliability(
    rows: Annotated[list[Path], typer.Argument(help="Files of rows")],
    out: Annotated[Path, typer.Option(help="The page")] = Path("docs/reliability.md"),
) -> None:
    """Write the page of faults, of calls beside held SMs, and of racing orders."""
    from flux_megatron.bench import reliability as page

    try:
        page.write(out, rows)
    except ValueError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    app(prog_name="flux-megatron")
