"""`flux-megatron` and `python -m flux_megatron`.

`doctor` and `--version` need the core alone; the other commands are typer's, of the extra `launch`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flux_megatron import command_errors, lab_commands
from flux_megatron.version import __version__

HELP = """Tensor-parallel layers for Megatron that hide communication behind GEMMs.

Without typer there is `flux-megatron doctor`: what this machine lacks for a run. The other
commands come with pip install 'flux-megatron[launch]'.
"""


def main() -> None:
    try:
        from flux_megatron.cli import app
    except ModuleNotFoundError as error:
        if error.name not in command_errors.EXTRAS:
            raise
        sys.exit(_plain(sys.argv[1:], error.name))
    app(prog_name="flux-megatron")


def _plain(words: Sequence[str], module: str) -> int:
    """The command line without typer, or whatever `module` is missing."""
    parser = command_errors.Parser(
        prog="flux-megatron", description=HELP, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--debug", action="store_true", help="Show the traceback of an error")
    parser.add_argument("command", help="doctor")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS")
    given = parser.parse_args(words)
    if given.command != "doctor":
        line = lab_commands.missing(given.command)
        print(line or command_errors.missing(module, given.command), file=sys.stderr)
        return 2
    from flux_megatron import doctor

    try:
        with command_errors.checked_stdout():
            return doctor.main(given.arguments, Path())
    except Exception as error:
        if given.debug:
            raise
        line, status = command_errors.ending(error, "doctor")
        print(line, file=sys.stderr)
        return status


if __name__ == "__main__":
    main()
