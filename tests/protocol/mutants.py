"""Broken copies of the product, each by one change of its source, that the tests must notice.

`mutants.diff` lists them. Each has a name, a case that it is run with, a file, and one hunk. The
lines that the hunk finds (context and minus) must occur exactly once in that file, so a mutant that
has gone stale is an error.

| idea | why it must be caught |
| --- | --- |
| a wait is missing, too weak, or for something else | rows are read before they have arrived |
| a signal is early, lost or misdirected | the same, or nobody ever proceeds |
| a half, a slot or an epoch is mistaken | a peer's next call overwrites what is still read |
| a captured call begins too early | a replay takes old signals, or overwrites what is still read |
| the two streams are not ordered | the copy engine reads too early, or what has been overwritten |
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from protocol_cases import Case
from virtual_product import Mutation

_THREE = {"world_size": 3, "rows": (9, 9, 9), "N": 16, "comm_rows": 5}

CASES = {
    "ag": Case("ag"),
    "ag, 3 ranks": Case("ag", **_THREE),
    "ag pipelined": Case("ag", "pipelined"),
    "rs": Case("rs", comm_rows=12),
    "rs, 3 ranks": Case("rs", **_THREE),
    "rs, one communication tile": Case("rs", comm_rows=20),
    # finely interleaved even without preemption
    "rs, a program a tile": Case("rs", rows=(40, 40, 40), programs=1_000),
    "rs pipelined": Case("rs", "pipelined"),
    "rs pipelined, 3 ranks": Case("rs", "pipelined", **_THREE),
    "captured ag": Case("ag", rows=(9,) * 6, captured=True),
    "captured rs": Case("rs", rows=(9,) * 6, captured=True),
    "captured rs, 3 ranks": Case("rs", world_size=3, rows=(9,) * 6, N=16, captured=True),
    "backward": Case("backward"),
    "backward, 3 ranks": Case("backward", **_THREE),
}


@dataclass(frozen=True)
class Mutant:
    name: str
    case: Case
    mutation: Mutation

    def __str__(self) -> str:
        return self.name


def _parse(paragraph: str) -> Mutant:
    """Three lines of comment, then a hunk."""
    title, case, file, *hunk = paragraph.splitlines()
    old = [line[1:] for line in hunk if line[0] in " -"]
    new = [line[1:] for line in hunk if line[0] in " +"]
    mutation = Mutation(file.removeprefix("# file: "), _text(old), _text(new))
    return Mutant(title.removeprefix("# "), CASES[case.removeprefix("# case: ")], mutation)


def _text(lines: list[str]) -> str:
    """Whole lines, and nothing else: the newline before the first is part of what is found."""
    return "\n" + "".join(f"{line}\n" for line in lines)


_LIST = Path(__file__).with_name("mutants.diff")
MUTANTS = [_parse(paragraph) for paragraph in _LIST.read_text().strip().split("\n\n")]
