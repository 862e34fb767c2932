"""One process of a run: `torchrun ... -m flux_megatron.launch pretrain_gpt.py ARGS --flux-overlap`.

The script is the user's own, and ARGS are Megatron's and ours; options for us come before it.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from flux_megatron.errors import BadInput
from flux_megatron.launch import CPU, ONE_QUEUE


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m flux_megatron.launch", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda",
        help="cpu: try it out without GPUs, in a checkout; kernels are interpreted",
    )  # fmt: skip
    parser.add_argument("--refusal", type=Path, help=argparse.SUPPRESS)  # for who started the ranks
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args(argv)
    if given.device == "cpu":
        os.environ.update(CPU | ONE_QUEUE)
    from flux_megatron import lab_commands
    from flux_megatron.integration import bootstrap

    try:
        bootstrap.enter(given.script, given.arguments)
        if given.device == "cpu":
            lab_commands.load(lab_commands.ON_CPU)()
        bootstrap.run()
    except BadInput as error:
        _refuse(str(error), given.refusal)
    except KeyboardInterrupt:
        sys.exit(130)


def _refuse(text: str, file: Path | None) -> NoReturn:
    """End with status 2. All ranks refuse the same, and the terminal shows a file's text once."""
    if file is None:
        print(text, file=sys.stderr)
    else:
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(text)
        partial.replace(file)  # whole, although other ranks are killed while they write it
    sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
