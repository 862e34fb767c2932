"""`flux-megatron launch`: an experiment as jobs of Slurm, on this machine, or on paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def launch(
    experiment: Annotated[str, typer.Argument(metavar="EXPERIMENT", help="As cpu/tiny, or a YAML")],
    run_dir: Annotated[Path | None, typer.Option(help="Default: runs/EXPERIMENT")] = None,
    arm: Annotated[list[str] | None, typer.Option(help="Only these arms")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Other values")
    ] = None,
    megatron_lm: Annotated[
        Path | None,
        typer.Option(envvar="FLUX_MEGATRON_LM", metavar="DIR", help="Checkout of Megatron-LM"),
    ] = None,
    data_path: Annotated[
        list[str] | None, typer.Option(help="Instead of mock data, or of Python's sources")
    ] = None,
    save_interval: Annotated[
        int | None,
        typer.Option(min=0, help="Steps between checkpoints; 0: none, a requeue starts anew"),
    ] = None,
    site: Annotated[Path | None, typer.Option(help="YAML of what is special here")] = None,
    sbatch: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Such as partition=a100")
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Variables of the ranks")
    ] = None,
    alternate: Annotated[
        int | None,
        typer.Option(
            metavar="ROUNDS",
            min=0,
            help="All arms in turn, so often; default: 2 for several arms; 0: once, no round-N/",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in RUN_DIR")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print all, write nothing")] = False,
    submit: Annotated[bool, typer.Option("--submit", help="Hand it to Slurm")] = False,
    here: Annotated[bool, typer.Option("--local", help="Run it on this machine")] = False,
) -> None:
    """Run an experiment of configs/experiments: print it, write its scripts, submit or run them.

    docs/cluster.md has the whole story.
    """
    if dry_run + submit + here > 1:
        raise typer.BadParameter("one of --dry-run, --submit and --local expected")
    from flux_megatron.errors import BadInput
    from flux_megatron.launch import launching
    from flux_megatron.launch.errors import ExperimentError, LaunchError

    request = launching.Request(
        experiment=experiment,
        run=run_dir,
        arms=tuple(arm or ()),
        overrides=tuple(set_ or ()),
        checkout=megatron_lm,
        data=tuple(data_path or ()),
        save_interval=save_interval,
        site=site,
        sbatch=tuple(sbatch or ()),
        environment=tuple(env or ()),
        resume=resume,
        rounds=alternate,
    )
    try:
        prepared = launching.prepare(request)
        if dry_run:
            typer.echo(prepared.shown())
        elif submit:
            typer.echo(prepared.submit())
        elif here:
            code = prepared.run_here(typer.echo)
            if code:
                again = "--resume --local" + "".join(f" --set {text}" for text in set_ or ())
                run = prepared.options.run
                words = f"flux-megatron launch {experiment} --run-dir {run} {again}"
                typer.echo(f"go on with: {words}", err=True)
            raise typer.Exit(code)
        else:
            typer.echo(f"wrote {prepared.write()}: start it with sbatch")
    except (ExperimentError, LaunchError, BadInput) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
