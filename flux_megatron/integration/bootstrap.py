"""The user's training script as the main program, in a process whose Megatron knows our flags."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from flux_megatron.command_errors import is_there
from flux_megatron.errors import BadInput
from flux_megatron.integration.arguments import Argument, arguments_of
from flux_megatron.integration.flags import add_flux_arguments
from flux_megatron.integration.replaced import around
from flux_megatron.versions import megatron_core


def check(script: str, arguments: Sequence[str]) -> None:
    """`BadInput` unless `script` is a file that megatron.training is beside, or on PYTHONPATH, of a
    release that we support, and the package is there that writes checkpoints: without it Megatron
    waits for writers that died.
    """
    if not Path(script).is_file():
        raise BadInput(f"{script}: no such file; Megatron-LM's pretrain_gpt.py or another expected")
    beside = Path(script).resolve().parent
    if not (beside / "megatron" / "training").is_dir() and not is_there("megatron.training"):
        raise BadInput(
            f"no megatron.training beside {script} or on PYTHONPATH: the package megatron-core "
            "does not have it, a checkout of Megatron-LM does"
        )
    megatron_core.check(beside)
    saves = any(word.partition("=")[0] == "--save" for word in arguments)
    if saves and not is_there("psutil"):
        raise BadInput("--save: Megatron's checkpoints need psutil: pip install psutil")


def enter(script: str, arguments: list[str]) -> None:
    """Let this process look like `python SCRIPT ARGUMENTS`, before anything of Megatron is loaded:
    it is looked for beside the script first. `BadInput` as `check`.
    """
    check(script, arguments)
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

    @around(arguments, "add_megatron_arguments")
    def extended(original: Any, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = original(parser)
        known = arguments_of(parser)  # before a script adds its own
        return _installing(add_flux_arguments(parser), known)


def _installing(parser: Any, known: Mapping[str, Argument]) -> Any:
    """The parser, which from now on installs what it parses. `BadInput` for arguments that cannot
    go together, and for those it does not know: its own error shows a thousand lines of usage.
    """
    from flux_megatron.integration.install import install_from

    parse = parser.parse_known_args  # parse_args calls it too

    def parse_known_args(*given: Any, **named: Any) -> Any:
        args, unknown = parse(*given, **named)
        try:
            install_from(args, known)
        except ValueError as error:
            raise BadInput(f"{sys.argv[0]}: {error}") from None
        return args, unknown

    def refuse(message: str) -> NoReturn:
        raise BadInput(f"{sys.argv[0]}: {message} (see --help)")

    parser.parse_known_args, parser.error = parse_known_args, refuse
    return parser
