"""Embedding + All-to-All under every standard schedule; and broken copies that must fail there.

`embedding_mutants.diff` lists them as `mutants.diff` does.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from embedding_ranks import BagsCase, run
from interpreted_access import needs_interpreter
from memory_checker import OutOfBounds
from mutants import Mutant, hunks
from protocol_cases import WrongResult
from virtual_machine import PackageCopy, mutated
from virtual_ranks import STANDARD, Deadlock, Schedule

pytestmark = needs_interpreter

CASES = {
    "forward": BagsCase(("forward",)),
    "backward": BagsCase(("backward",)),
    "both": BagsCase(),
    "three ranks": BagsCase(tables=(1, 2, 1), samples=2, slice_samples=1, calls=2),
    "captured": BagsCase(samples=3, calls=4, captured=True),
    "one slice": BagsCase(("forward",), samples=4, slice_samples=4, block=4, ctas=1),
}
EMBEDDING_MUTANTS = [
    Mutant(title, CASES[case], mutation)
    for title, case, mutation in hunks(Path(__file__).with_name("embedding_mutants.diff"), "case")
]


@pytest.fixture(scope="module")
def package() -> PackageCopy:
    return PackageCopy("flux_megatron")


@pytest.mark.parametrize("case", CASES)
def test_exact(package, case):
    for schedule in STANDARD[::2] if case == "both" else STANDARD[::6]:
        run(CASES[case], package, schedule)


def is_caught(mutant: Mutant, package: PackageCopy, schedule: Schedule) -> bool:
    try:
        run(mutant.case, package, schedule)
    except (Deadlock, OutOfBounds, WrongResult):
        return True
    return False


@pytest.mark.parametrize("mutant", EMBEDDING_MUTANTS, ids=str)
def test_mutant_is_caught(mutant, tmp_path):
    soonest_first = (STANDARD[0], *STANDARD[:0:-1])
    with mutated(mutant.mutation, tmp_path) as package:
        assert any(is_caught(mutant, package, one) for one in soonest_first), mutant.name
