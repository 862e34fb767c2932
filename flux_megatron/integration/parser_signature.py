"""What Megatron-LM's own argument parsers accept, recorded release by release.

`signatures.tsv` holds every option, a line for each type that it has, with the releases that have
it so; `scripts/record_release.py` records a checkout. `check` holds arguments against that, where
there is neither a checkout nor torch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "signatures.tsv"
ALL = "all"  # in place of the names of all releases
TYPES = {"int": int, "float": float, "str": str}
Signature = dict[str, Any]  # options: `flag`, `int`, `float` or `str`, or a dictionary with more


@cache
def recorded() -> dict[str, Signature]:
    """What each release's parser accepts."""
    head, *lines = FILE.read_text().splitlines()
    names = head.split("\t")[2].split()
    found: dict[str, Signature] = {name: {} for name in names}
    for option, described, who in (line.split("\t") for line in lines):
        for name in names if who == ALL else who.split():
            found[name][option] = json.loads(described)
    return found


def releases() -> list[str]:
    """The releases of Megatron-LM whose parsers are recorded."""
    return [*recorded()]


def known_options() -> set[str]:
    """Those of any release, and ours."""
    return {name for one in recorded().values() for name in one} | {*_ours()._option_string_actions}


def check(arguments: list[str], release: str) -> list[str]:
    """What the release's parser, with our options added, would refuse; empty if nothing."""
    parser = _parser(release)
    errors = []
    for option in options(arguments):
        try:
            parser.parse_args(option)
        except argparse.ArgumentTypeError as error:  # noqa: PERF203, every option is reported
            errors.append(f"{release}: {' '.join(option)}: {error}")
    return errors


def options(arguments: Iterable[str]) -> list[list[str]]:
    """Each option with its values; what stands before the first one has none."""
    found: list[list[str]] = []
    for argument in arguments:
        if argument.startswith("--") or not found:
            found.append([])
        found[-1].append(argument)
    return found


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise argparse.ArgumentTypeError(message.removeprefix("argument "))


def _ours() -> _Parser:
    """A parser with the options that `--flux-overlap` brings along."""
    from flux_megatron.integration.flags import add_flux_arguments

    parser = _Parser(prog="pretrain_gpt.py", allow_abbrev=False, add_help=False)
    add_flux_arguments(parser)
    return parser


@cache
def _parser(release: str) -> _Parser:
    parser = _ours()
    for name, described in recorded()[release].items():
        if described == "flag":
            parser.add_argument(name, action="store_true")
            continue
        more = {"type": described} if isinstance(described, str) else described
        parser.add_argument(name, **more | {"type": TYPES[more["type"]]})
    return parser
