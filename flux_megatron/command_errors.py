"""What ends a command, in one line, and its exit status. No typer: the core alone can say it.
`checked_stdout` is for what a command writes: a disk may be full, and an `OSError` names no file.

A `FluxError` is what a user can mend: its message stands alone. Of a package that is missing the
line names the extra that brings it. All else names its type, as it may be a fault of ours.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NoReturn

from flux_megatron.errors import BadInput, FluxError, RunFailed

# of pyproject.toml, which tests hold this against
EXTRAS = {
    "jinja2": "launch",
    "matplotlib": "launch",
    "pydantic": "launch",
    "rich": "launch",
    "typer": "launch",
    "yaml": "launch",
    "megatron": "megatron",
    "numpy": "train",
    "psutil": "train",
    "pynvml": "lab",
    "scipy": "lab",
}
# commands whose extra brings more than what `launch` does
EXTRA_OF_COMMAND = {"train": "train", "generate": "train", "run": "megatron"} | dict.fromkeys(
    ("bench", "simulate", "results"), "lab"
)


def ending(error: BaseException, command: str = "") -> tuple[str, int]:
    """(line for stderr, exit status): 2 for what the user can mend, 1 for a failed run."""
    if isinstance(error, FluxError):
        return str(error), error.exit_status
    if isinstance(error, ModuleNotFoundError) and (line := missing(str(error.name), command)):
        return line, 2
    text = " ".join(str(error).split())
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    again = f"flux-megatron --debug {command}".rstrip()
    return f"{line} (run again with --debug for the traceback: {again} ...)", 1


def missing(module: str, command: str = "") -> str | None:
    """Which extra brings a module, in one line; None for a module that none brings."""
    package = module.split(".")[0]
    if package not in EXTRAS:
        return None
    brings = EXTRA_OF_COMMAND.get(command, EXTRAS[package])
    subject = f"flux-megatron {command}".rstrip()
    return f"{subject}: {package} is not installed: pip install 'flux-megatron[{brings}]'"


def require(command: str, *modules: str) -> None:
    """`BadInput` that names all of the modules which are not installed, and the extra."""
    if lacking := ", ".join(module for module in modules if not is_there(module)):
        remedy = f"pip install 'flux-megatron[{extra(command)}]'"
        raise BadInput(f"flux-megatron {command}: {lacking} not installed: {remedy}")


def extra(command: str) -> str:
    return EXTRA_OF_COMMAND.get(command, "launch")


def is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # the package it is in, or it is loaded but in part
        return False


@contextmanager
def checked_stdout() -> Iterator[None]:
    """`RunFailed` where stdout cannot be written, at the latest at the end. Who reads a pipe may
    leave early: that ends the process, without a word.
    """
    original: Any = sys.stdout
    sys.stdout = checked = _Checked(original)
    try:
        try:
            yield
        except SystemExit:
            checked.flush()
            if checked.failed:  # which argparse does not say
                sys.exit(1)
            raise
        checked.flush()
    except BrokenPipeError:
        sys.exit(1)
    finally:
        sys.stdout = original
        if checked.failed:  # what is left in it would fail once more when Python ends
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, original.fileno())
            os.close(nowhere)


class _Checked:
    """All of a text stream; `write` and `flush` name it when they fail."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.failed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._named():
            return int(self._stream.write(text))

    def flush(self) -> None:
        with self._named():
            self._stream.flush()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failed = True
            if isinstance(error, BrokenPipeError):
                raise
            reason = (error.strerror or type(error).__name__).lower()
            raise RunFailed(f"stdout not written: {reason}") from None


class Parser(argparse.ArgumentParser):
    """Python's own, with the errors of typer's commands here: one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")
