"""What each argument of Megatron-LM means for our layers: the table `arguments.tsv`.

| class | what happens when the argument is set away from its default |
| --- | --- |
| harmless | nothing: no layer of ours and nothing beside one reads it |
| supported | it works: the named test shows it; some values may be refused by `requirements` |
| untried | refused, unless `--flux-allow` names it: nothing shows that it works |
| refused | refused: it is known not to work |

An argument that is not in the table is treated as untried. `python
scripts/argument_page.py` writes the table as docs/arguments.md.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("arguments.tsv")
CLASSES = ("harmless", "supported", "untried", "refused")
PARSER = "megatron.training.arguments"
_UNKNOWN = "flux_megatron does not know this argument"


@dataclass(frozen=True)
class Row:
    """`because`: the test of what is supported, as pytest names it below tests/; else a reason."""

    option: str
    kind: str
    because: str


@dataclass(frozen=True)
class Argument:
    """One attribute of parsed arguments: all options that set it, and its value without them."""

    options: tuple[str, ...]
    default: Any


@cache
def table() -> dict[str, Row]:
    """The rows by option. `ValueError` names a line that is none."""
    rows: dict[str, Row] = {}
    for line in FILE.read_text(encoding="utf-8").splitlines()[1:]:
        cells = line.split("\t")
        if len(cells) != 3 or cells[1] not in CLASSES or cells[0] in rows:
            raise ValueError(f"{FILE.name}: {line!r} given, a new option, one of {CLASSES} and a "
                             "reason expected, with tabs between them")  # fmt: skip
        rows[cells[0]] = Row(*cells)
    return rows


def row_of(argument: Argument) -> Row:
    """The strictest row of the options that set an argument."""
    rows = [table()[option] for option in argument.options if option in table()]
    if not rows:
        return Row(argument.options[0], "untried", _UNKNOWN)
    return max(rows, key=lambda row: CLASSES.index(row.kind))


def arguments_of(parser: argparse.ArgumentParser) -> dict[str, Argument]:
    """The arguments of a parser by attribute, ours left out.

    Options and defaults that a script adds or changes later are not seen.
    """
    found: dict[str, Argument] = {}
    for action in parser._actions:
        options = tuple(o for o in action.option_strings if o.startswith("--"))
        if not options or options[0].startswith("--flux-"):
            continue
        if known := found.get(action.dest):  # argparse takes the default of the first
            found[action.dest] = Argument(known.options + options, known.default)
            continue
        default = action.default
        if isinstance(default, str):
            default = parser._get_value(action, default)
        found[action.dest] = Argument(options, default)
    return found


def non_defaults(args: Any, known: Mapping[str, Argument]) -> Iterator[tuple[Argument, Any]]:
    """The known arguments that are not at their defaults, with their values."""
    for name, argument in known.items():
        value = getattr(args, name, argument.default)
        if value != argument.default:
            yield argument, value


def arguments_of_megatron() -> dict[str, Argument]:
    """Those of the parser of this process's Megatron-LM; none where it has not been imported."""
    parser = _parser_of_megatron()
    return {} if parser is None else arguments_of(parser)


def parse_command_line() -> Any:
    """What Megatron's parser makes of the command line, before anything is validated or changed."""
    parser = _parser_of_megatron()
    return argparse.Namespace() if parser is None else parser.parse_known_args()[0]


def _parser_of_megatron() -> argparse.ArgumentParser | None:
    if PARSER not in sys.modules:
        return None
    return _built_by(inspect.unwrap(sys.modules[PARSER].add_megatron_arguments))


@cache  # Megatron-LM parses up to three times
def _built_by(add_arguments: Callable[..., argparse.ArgumentParser]) -> argparse.ArgumentParser:
    return add_arguments(argparse.ArgumentParser(allow_abbrev=False))
