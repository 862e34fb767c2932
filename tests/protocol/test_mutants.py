"""The tests of the tests: every mutant must fail under at least one of the standard schedules. The
first that catches it ends a test.
"""

from __future__ import annotations

import pytest
from emulated_memory import Misuse
from interpreted_access import needs_interpreter
from memory_checker import OutOfBounds
from mutants import CASES, MUTANTS, Mutant
from virtual_hosts import WrongResult
from virtual_machine import PackageCopy, mutated
from virtual_ranks import STANDARD, Deadlock, Schedule

from flux_megatron.errors import CapacityExceeded

pytestmark = needs_interpreter
# any other exception is a mistake in the mutant; of refusals this one: counts that no rank has sent
CAUGHT = (Deadlock, WrongResult, OutOfBounds, Misuse, CapacityExceeded)


def catches(schedule: Schedule, mutant: Mutant, package: PackageCopy) -> bool:
    try:
        mutant.case.run(package, schedule)
    except CAUGHT:
        return True
    return False


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_is_caught(mutant, tmp_path):
    soonest_first = (STANDARD[0], *STANDARD[:0:-1])
    with mutated(mutant.mutation, tmp_path) as package:
        caught = any(catches(schedule, mutant, package) for schedule in soonest_first)
    assert caught, f"no schedule notices: {mutant.name}"


@pytest.mark.parametrize("case", CASES)
def test_unmutated_package_passes(package, case):
    for schedule in STANDARD:
        CASES[case].run(package, schedule)
