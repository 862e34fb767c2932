"""`flux-megatron launch`: an experiment as jobs of Slurm, on this machine, or on paper."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

Texts = list[str] | None
ROUNDS = "All arms in turn, so often; default: 2 for several arms; 0: once, no round-N/"
SAVE = "Steps between checkpoints; 0: none, a requeue starts anew"
DATA = "Instead of mock data, or of Python's sources"
LM = {"envvar": "FLUX_MEGATRON_LM", "metavar": "DIR", "help": "Checkout of Megatron-LM"}


def launch(
    experiment: Annotated[str, Argument(metavar="EXPERIMENT", help="As cpu/tiny, or a YAML")],
    run_dir: Annotated[Path | None, Option(help="Default: runs/EXPERIMENT")] = None,
    arm: Annotated[Texts, Option(help="Only these arms")] = None,
    set_: Annotated[Texts, Option("--set", metavar="KEY=VALUE", help="Other values")] = None,
    megatron_lm: Annotated[Path | None, Option(**LM)] = None,
    data_path: Annotated[Texts, Option(help=DATA)] = None,
    save_interval: Annotated[int | None, Option(min=0, help=SAVE)] = None,
    site: Annotated[Path | None, Option(help="YAML of what is special here")] = None,
    sbatch: Annotated[Texts, Option(metavar="KEY=VALUE", help="Such as partition=a100")] = None,
    env: Annotated[Texts, Option(metavar="KEY=VALUE", help="Variables of the ranks")] = None,
    alternate: Annotated[int | None, Option(metavar="ROUNDS", min=0, help=ROUNDS)] = None,
    resume: Annotated[bool, Option("--resume", help="Continue the run in RUN_DIR")] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Print all, write nothing")] = False,
    submit: Annotated[bool, Option("--submit", help="Hand it to Slurm")] = False,
    here: Annotated[bool, Option("--local", help="Run it on this machine")] = False,
) -> None:
    """Run an experiment of configs/experiments: print it, write its scripts, submit or run them.

    docs/cluster.md has the whole story.
    """
    if dry_run + submit + here > 1:
        raise typer.BadParameter("one of --dry-run, --submit and --local expected")
    from flux_megatron.launch import launching

    prepared = launching.prepare(
        experiment, run_dir, arm or (), set_ or (), megatron_lm, data_path or (), save_interval,
        site, sbatch or (), env or (), alternate, resume,
    )  # fmt: skip
    if dry_run:
        typer.echo(prepared.shown())
    elif submit:
        typer.echo(prepared.submit())
    elif not here:
        typer.echo(f"wrote {prepared.write()}: start it with sbatch")
    elif code := prepared.run_here(typer.echo):
        again = ["flux-megatron", "launch", experiment, "--run-dir", str(prepared.options.run)]
        again += ["--resume", "--local"]
        again += [word for text in set_ or () for word in ("--set", text)]
        again += [word for text in arm or () for word in ("--arm", text)]
        typer.echo(f"go on with: {shlex.join(again)}", err=True)
        raise typer.Exit(code)
