"""Where the commands of the laboratory are. The product knows them by these names alone: it loads
one when it is asked for, and works where `flux_megatron.lab` is not installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from flux_megatron import command_errors
from flux_megatron.errors import BadInput

LAB = "flux_megatron.lab"
COMMANDS = {  # module below it, and the function or typer app there; in the order of --help
    "bench": ("bench.commands", "app"),
    "simulate": ("simulate.commands", "simulate"),
    "results": ("results.commands", "results"),
    "train": ("train.commands", "train"),
    "generate": ("generate.commands", "generate"),
}
ON_CPU = "run --device cpu"  # the product's command, with what answers in place of a GPU
PLACES = COMMANDS | {ON_CPU: ("cpu", "pretend_gpu")}


def is_installed(command: str) -> bool:
    return command_errors.is_there(f"{LAB}.{PLACES[command][0]}")


def missing(command: str) -> str | None:
    """In one line why a command cannot start; None for one that is installed, or not of these."""
    if command not in PLACES or is_installed(command):
        return None
    extra = command_errors.extra(command)
    return (
        f"flux-megatron {command}: {LAB}, which has this command, is not installed: in a checkout "
        f"of flux_megatron, pip install -e '.[{extra}]'"
    )


def load(command: str) -> Any:
    """The function or typer app. `BadInput` where it is not installed."""
    if line := missing(command):
        raise BadInput(line)
    module, name = PLACES[command]
    return getattr(import_module(f"{LAB}.{module}"), name)
