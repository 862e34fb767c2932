"""`flux-megatron patch`: our flag in a Megatron-LM checkout; see patches/README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flux_megatron.patching import checkout as checkouts
from flux_megatron.patching.series import hunks

Checkout = Annotated[Path, typer.Argument(metavar="DIR", help="A checkout of Megatron-LM")]

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _main() -> None:
    """Add --flux-overlap to a Megatron-LM checkout's own arguments."""


@app.command()
def check(checkout: Checkout) -> None:
    """Show whether the patches fit and whether they are applied; fails if they do not fit."""
    state = checkouts.examine(checkout)
    if state.differences:
        raise checkouts.Refused(str(state))
    typer.echo(state)


@app.command()
def apply(checkout: Checkout) -> None:
    """Put the patches in, if they fit and are not in yet."""
    state = checkouts.apply(checkout)
    typer.echo(f"{state.series.folder.name}: applied to {_files(state)}")


@app.command()
def undo(checkout: Checkout) -> None:
    """Take the patches out again."""
    state = checkouts.undo(checkout)
    typer.echo(f"{state.series.folder.name}: taken out of {_files(state)}")


def _files(state: checkouts.State) -> str:
    return ", ".join(sorted({str(state.checkout / hunk.path) for hunk in hunks()}))
