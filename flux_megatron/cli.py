"""The command `flux-megatron`. Commands import what they need when they run: `--help` is quick.

Those of the laboratory are in `lab_commands`, by name.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from flux_megatron import doctor as plain_doctor
from flux_megatron.command_group import CommandGroup
from flux_megatron.launch.commands import launch
from flux_megatron.patching.commands import app as patch_app
from flux_megatron.tune_command.commands import tune
from flux_megatron.version import __version__

FOR_A_RUN = "Measure its plans, launch experiments, patch Megatron-LM"
app = typer.Typer(cls=CommandGroup, no_args_is_help=True, pretty_exceptions_enable=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit"
        ),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error")] = False,
) -> None:
    """Tensor-parallel layers for Megatron that hide communication behind GEMMs.

    Begin with `flux-megatron doctor`, then `flux-megatron run pretrain_gpt.py ARGS --flux-overlap`.
    """


# its own parser reads the arguments: it also runs where typer is not installed
AS_THEY_ARE = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=AS_THEY_ARE)
def doctor(context: typer.Context) -> None:
    """Say what this machine has of what a training run needs; fails if none could start."""
    raise typer.Exit(plain_doctor.main(context.args, Path()))


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
    device: Annotated[str, typer.Option(help="cpu: try it without GPUs, in a checkout")] = "cuda",
) -> None:
    """Run a Megatron-LM training script that also takes --flux-overlap; our options come before it.

    Under torchrun this is one rank of the run, otherwise it starts torchrun on this machine.
    """
    from flux_megatron.integration import bootstrap, torchrun

    command = ["--device", device, str(script), *(arguments or [])]
    if "RANK" in os.environ:
        from flux_megatron.launch.__main__ import main

        main(command)
        return
    from flux_megatron import machine

    machine.check_device(device)
    bootstrap.check(str(script), arguments or [])
    plain_doctor.check_script(script)
    ranks = machine.ranks(
        device,
        nproc_per_node,
        "--device cpu before the script",
        option="--nproc-per-node",
    )
    typer.echo(f"starting torchrun with {ranks} ranks of {script}", err=True)
    torchrun.run(ranks, command)


app.command(rich_help_panel=FOR_A_RUN)(tune)
app.command(rich_help_panel=FOR_A_RUN)(launch)
app.add_typer(patch_app, name="patch", rich_help_panel=FOR_A_RUN)

if __name__ == "__main__":
    app(prog_name="flux-megatron")
