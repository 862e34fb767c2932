"""What Megatron-LM's own argument parsers accept, recorded release by release.

`python -m flux_megatron.launch.parser_signature DIR RELEASE` records a checkout, in an environment
that can import its `megatron.training`; `signatures/RELEASE.json` then holds every option. `check`
holds arguments against that, where there is neither a checkout nor torch.
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

FOLDER = Path(__file__).parent / "signatures"
OURS = FOLDER / "flux_overlap.json"  # the options that `--flux-overlap` brings along
TYPES = {"int": int, "float": float, "str": str}

# Runs beside the checkout.
_DUMP = """
import argparse, pathlib, sys
sys.path[:0] = [{checkout!r}, {ours!r}]
from flux_megatron.versions.python import provide_override
provide_override()
from megatron.training.arguments import add_megatron_arguments
from flux_megatron.launch.parser_signature import dumped
parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
pathlib.Path({file!r}).write_text(dumped(parser))
"""


def record(checkout: Path, release: str) -> Path:
    """Run the checkout's parser and write `signatures/RELEASE.json`.

    `RuntimeError` with the end of its output if it cannot be imported.
    """
    file, ours = FOLDER / f"{release}.json", Path(__file__).parents[2]
    code = _DUMP.format(checkout=str(checkout.resolve()), ours=str(ours), file=str(file))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        raise RuntimeError(f"{checkout} has no parser that could be run:\n{done.stderr[-2000:]}")
    return file


def dumped(parser: argparse.ArgumentParser) -> str:
    """The options of a parser as JSON, one a line, sorted.

    An option is `flag`, `int`, `float` or `str` where that is all; else its type, its choices
    and how many values it takes.
    """
    options = {
        string: _described(action)
        for action in parser._actions
        for string in action.option_strings
        if string.startswith("--")
    }
    lines = (f"{json.dumps(name)}: {json.dumps(options[name])}" for name in sorted(options))
    return "{\n" + ",\n".join(lines) + "\n}\n"


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
    return sorted(file.stem for file in FOLDER.glob("*.json") if file != OURS)


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
    for file in (FOLDER / f"{release}.json", OURS):
        for name, described in json.loads(file.read_text()).items():
            parser.add_argument(name, **_keywords(described))
    return parser


def _keywords(described: str | dict[str, Any]) -> dict[str, Any]:
    if described == "flag":
        return {"action": "store_true"}
    more = {"type": described} if isinstance(described, str) else dict(described)
    return more | {"type": TYPES[more["type"]], "default": argparse.SUPPRESS}


if __name__ == "__main__":
    print(record(Path(sys.argv[1]), sys.argv[2]))
