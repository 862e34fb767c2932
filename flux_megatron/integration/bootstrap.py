"""The user's training script as the main program, in a process whose Megatron knows our flags."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flux_megatron.errors import BadInput
from flux_megatron.integration.arguments import Argument, arguments_of
from flux_megatron.integration.flags import add_flux_arguments


def check(script: str) -> None:
    """`BadInput` unless `script` is a file that megatron.training is beside, or on PYTHONPATH."""
    if not Path(script).is_file():
        raise BadInput(f"{script}: no such file; Megatron-LM's pretrain_gpt.py or another expected")
    beside = Path(script).resolve().parent / "megatron" / "training"
    if not beside.is_dir() and not _installed("megatron.training"):
        raise BadInput(
            f"no megatron.training beside {script} or on PYTHONPATH: the package megatron-core "
            "does not have it, a checkout of Megatron-LM does"
        )


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def enter(script: str, arguments: list[str]) -> None:
    """Let this process look like `python SCRIPT ARGUMENTS`, before anything of Megatron is loaded:
    it is looked for beside the script first. `BadInput` as `check`.
    """
    check(script)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))


def run() -> None:
    """Run the script that was entered."""
    extend_parser()
    runpy.run_path(sys.argv[0], run_name="__main__")


def extend_parser() -> None:
    """Make Megatron's parser take our arguments, and act on them as soon as it has parsed.

    `parse_args` looks `add_megatron_arguments` up by its name in every version of Megatron-LM.
    """
    from megatron.training import arguments

    original = arguments.add_megatron_arguments

    @functools.wraps(original)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = original(parser)
        known = arguments_of(parser)  # before a script adds its own
        return _installing(add_flux_arguments(parser), known)

    arguments.add_megatron_arguments = add_megatron_arguments


def _installing(parser: Any, known: Mapping[str, Argument]) -> Any:
    """The parser, which from now on installs what it parses; bad combinations end the process."""
    from flux_megatron.integration.install import install_from

    parse = parser.parse_known_args  # parse_args calls it too

    def parse_known_args(*given: Any, **named: Any) -> Any:
        args, unknown = parse(*given, **named)
        try:
            install_from(args, known)
        except ValueError as error:
            parser.exit(2, f"{sys.argv[0]}: {error}\n")
        return args, unknown

    parser.parse_known_args = parse_known_args
    return parser
