"""`signalled` experts under every standard schedule; and broken copies that must fail there.

`signalled_expert_mutants.diff` lists them as `mutants.diff` does.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreted_access import needs_interpreter
from memory_checker import OutOfBounds
from mutants import Mutant, hunks
from protocol_cases import WrongResult
from signalled_expert_cases import BandCase
from virtual_machine import PackageCopy, mutated
from virtual_ranks import STANDARD, Deadlock, Schedule

pytestmark = needs_interpreter

CASES = {
    "there": BandCase("dispatch", experts=3, calls=2, most=12),
    "back": BandCase("combine", experts=3, calls=2, most=12),
    "back, 3 ranks": BandCase("combine", 3, calls=2, most=9, bands=3),
    "both": BandCase("both", 3, experts=1, most=9, bands=2),
}
SIGNALLED_EXPERT_MUTANTS = [
    Mutant(title, CASES[case], mutation)
    for title, case, mutation in hunks(
        Path(__file__).with_name("signalled_expert_mutants.diff"), "case"
    )
]


@pytest.fixture(scope="module")
def package() -> PackageCopy:
    return PackageCopy("flux_megatron")


@pytest.mark.parametrize("case", CASES)
def test_exact(package, case):
    for schedule in STANDARD[::2] if case == "both" else STANDARD[::6]:
        CASES[case].run(package, schedule)


def is_caught(mutant: Mutant, package: PackageCopy, schedule: Schedule) -> bool:
    try:
        mutant.case.run(package, schedule)
    except (Deadlock, OutOfBounds, WrongResult):
        return True
    return False


@pytest.mark.parametrize("mutant", SIGNALLED_EXPERT_MUTANTS, ids=str)
def test_mutant_is_caught(mutant, tmp_path):
    soonest_first = (STANDARD[0], *STANDARD[:0:-1])
    with mutated(mutant.mutation, tmp_path) as package:
        assert any(is_caught(mutant, package, one) for one in soonest_first), mutant.name
