"""What Megatron-LM's own argument parsers accept, recorded release by release.

`python -m flux_megatron.launch.parser_signature DIR RELEASE` records a checkout, in an environment
that can import its `megatron.training`; `signatures.tsv` then holds every option, a line for each
type that it has, with the releases that have it so. `check` holds arguments against that, where
there is neither a checkout nor torch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "signatures.tsv"
OURS = "flux_overlap"  # in place of a release: the options that `--flux-overlap` brings along
ALL = "all"  # in place of the names of all releases
TYPES = {"int": int, "float": float, "str": str}
Signature = dict[str, Any]  # options: `flag`, `int`, `float` or `str`, or a dictionary with more

# Runs beside the checkout.
_DUMP = """
import argparse, json, sys
sys.path[:0] = [{checkout!r}, {ours!r}]
from flux_megatron.versions.python import provide_override
provide_override()
from megatron.training.arguments import add_megatron_arguments
from flux_megatron.launch.parser_signature import signature_of
parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
print()  # imports may have left a line unfinished
print(json.dumps(signature_of(parser)))
"""


def record(checkout: Path, release: str) -> Path:
    """Run the checkout's parser and write what it accepts into `signatures.tsv`.

    `RuntimeError` with the end of its output if it cannot be imported.
    """
    code = _DUMP.format(checkout=str(checkout.resolve()), ours=str(Path(__file__).parents[2]))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        raise RuntimeError(f"{checkout} has no parser that could be run:\n{done.stderr[-2000:]}")
    FILE.write_text(table(recorded() | {release: json.loads(done.stdout.splitlines()[-1])}))
    recorded.cache_clear()
    return FILE


def signature_of(parser: argparse.ArgumentParser) -> Signature:
    """An option is `flag`, `int`, `float` or `str` where that is all; else its type, its choices
    and how many values it takes.
    """
    return {
        string: _described(action)
        for action in parser._actions
        for string in action.option_strings
        if string.startswith("--")
    }


def table(signatures: dict[str, Signature]) -> str:
    """`signatures.tsv`, sorted: after its head, which names the releases, an option, its type in
    JSON and who has it.
    """
    names = sorted(signatures.keys() - {OURS})
    having: dict[tuple[str, str], list[str]] = {}
    for name in [*names, OURS]:
        for option, described in signatures[name].items():
            having.setdefault((option, json.dumps(described)), []).append(name)
    lines = [f"option\ttype\t{' '.join(names)}"]
    for (option, described), who in sorted(having.items()):
        lines.append(f"{option}\t{described}\t{ALL if who == names else ' '.join(who)}")
    return "\n".join(lines) + "\n"


@cache
def recorded() -> dict[str, Signature]:
    """What each release's parser accepts, and `OURS`."""
    return read(FILE.read_text())


def read(text: str) -> dict[str, Signature]:
    """The signatures of such a table."""
    head, *lines = text.splitlines()
    names = head.split("\t")[2].split()
    found: dict[str, Signature] = {name: {} for name in [*names, OURS]}
    for option, described, who in (line.split("\t") for line in lines):
        for name in names if who == ALL else who.split():
            found[name][option] = json.loads(described)
    return found


def _described(action: argparse.Action) -> str | dict[str, Any]:
    if action.nargs == 0:
        return "flag"
    name = getattr(action.type, "__name__", "str")
    described: dict[str, Any] = {"type": name if name in TYPES else "str"}
    if action.choices is not None:
        described["choices"] = [getattr(choice, "name", choice) for choice in action.choices]
    if action.nargs is not None:
        described["nargs"] = action.nargs
    return described if len(described) > 1 else str(described["type"])


def releases() -> list[str]:
    """The releases of Megatron-LM whose parsers are recorded."""
    return [name for name in recorded() if name != OURS]


def version(checkout: Path) -> str:
    """Such as 0.16.1, read from the sources of a checkout."""
    file = checkout / "megatron" / "core" / "package_info.py"
    text = file.read_text() if file.is_file() else ""
    parts = [re.search(rf"^{name} = (\d+)", text, re.M) for name in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(part.group(1) for part in parts if part) or "of an unknown version"


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


@cache
def _parser(release: str) -> _Parser:
    if release not in releases():
        raise ValueError(f"Megatron-LM {release!r} given, one of {releases()} expected")
    parser = _Parser(prog="pretrain_gpt.py", allow_abbrev=False, add_help=False)
    for who in (release, OURS):
        for name, described in recorded()[who].items():
            parser.add_argument(name, **_keywords(described))
    return parser


def _keywords(described: str | dict[str, Any]) -> dict[str, Any]:
    if described == "flag":
        return {"action": "store_true"}
    more = {"type": described} if isinstance(described, str) else dict(described)
    return more | {"type": TYPES[more["type"]], "default": argparse.SUPPRESS}


if __name__ == "__main__":
    print(record(Path(sys.argv[1]), sys.argv[2]))
