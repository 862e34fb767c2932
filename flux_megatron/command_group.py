"""How every command of the typer app ends: by its exit status, with at most one line on stderr."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from flux_megatron import command_errors, lab_commands

LAB_PANEL = "Laboratory: measure, predict, demonstrate"
UsageError: Any = typer.BadParameter.__base__  # click's, or typer's own copy of it since 0.26


class CommandGroup(TyperGroup):
    """The root group. Its option `debug` lets exceptions through, for their traceback.

    A command of the laboratory has only a name here until it is asked for.
    """

    debug = False
    command = ""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in filter(lab_commands.is_installed, lab_commands.COMMANDS):
            self.add_command(TyperCommand(name))

    def invoke(self, ctx: Any) -> Any:
        self.debug = ctx.params["debug"]
        return super().invoke(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        self.command = cmd_name
        if cmd_name in lab_commands.COMMANDS:
            self.add_command(_of_lab(cmd_name))
        return super().get_command(ctx, cmd_name)

    def main(  # type: ignore[override]  # typer gives names
        self, args: Any = None, *, standalone_mode: bool = True, **options: Any
    ) -> Any:
        _open_standard_streams()
        options |= {"args": args, "standalone_mode": False}  # it raises: nothing is printed
        try:
            with command_errors.checked_stdout():
                status = super().main(**options)
        except UsageError as error:
            typer.echo(_usage(error, f"flux-megatron {self.command}".rstrip()), err=True)
            status = error.exit_code
        except typer.Abort:
            status = 130
        except Exception as error:
            if self.debug:
                raise
            line, status = command_errors.ending(error, self.command)
            typer.echo(line, err=True)
        if standalone_mode:
            sys.exit(status or 0)
        return status


def _of_lab(name: str) -> Any:
    app, found = typer.Typer(), lab_commands.load(name)
    if isinstance(found, typer.Typer):
        app.add_typer(found, name=name, rich_help_panel=LAB_PANEL)
    else:
        app.command(name, rich_help_panel=LAB_PANEL)(found)
    return typer.main.get_group(app).commands[name]


def _open_standard_streams() -> None:
    """Those that the shell has closed (`>&-`): else a file of ours would get their number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115, while the process runs


def _usage(error: Any, command: str) -> str:
    """What is wrong with the words of a command; without any it is the help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return str(error.format_message())
    text, path = " ".join(error.format_message().split()), command
    if error.ctx is not None:
        path = error.ctx.command_path
    if found := getattr(error.__cause__, "errors", None):  # pydantic's, whose texts lack the value
        text = f"{text}, {found()[0]['input']!r} given"
    return f"{path}: {text} (see {path} --help)"
