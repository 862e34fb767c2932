"""The tests of the tests: every mutant must fail under at least one of the standard schedules.

A test ends when the first schedule has caught its mutant. Run as a script, this file tries all
schedules and prints the table of mutants and schedules:

    TRITON_INTERPRET=1 FLUX_MEGATRON_POISON=1 PYTHONPATH=. python tests/protocol/test_mutants.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from emulated_memory import Misuse
from interpreted_access import needs_interpreter
from memory_checker import OutOfBounds
from mutants import CASES, MUTANTS, Mutant
from protocol_cases import WrongResult
from virtual_machine import PackageCopy, mutated
from virtual_ranks import STANDARD, Deadlock, Schedule

from flux_megatron.errors import CapacityExceeded

pytestmark = needs_interpreter
_SHORT = {
    Deadlock: "deadlock", WrongResult: "wrong", OutOfBounds: "address", Misuse: "mbarrier",
    CapacityExceeded: "refused",  # counts that no rank has sent
}  # fmt: skip


def _outcome(mutant: Mutant, package: PackageCopy, schedule: Schedule) -> str:
    """How the schedule caught the mutant, or "". Any other exception is a mistake in the mutant."""
    try:
        mutant.case.run(package, schedule)
    except tuple(_SHORT) as error:
        return _SHORT[type(error)]
    return ""


def outcomes(
    mutant: Mutant, folder: Path, schedules: Sequence[Schedule] = STANDARD
) -> Iterator[str]:
    """One schedule after the other."""
    with mutated(mutant.mutation, folder) as package:
        for schedule in schedules:
            yield _outcome(mutant, package, schedule)


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_is_caught(mutant, tmp_path):
    soonest_first = (STANDARD[0], *STANDARD[:0:-1])
    assert any(outcomes(mutant, tmp_path, soonest_first)), f"no schedule notices: {mutant.name}"


def test_names_are_unique():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("case", CASES)
def test_unmutated_package_passes(package, case):
    for schedule in STANDARD:
        CASES[case].run(package, schedule)


def print_table() -> None:
    """Every mutant under every schedule: how it was caught, "-" where it was not."""
    width = max(len(mutant.name) for mutant in MUTANTS)
    print(" " * width, *(f"{schedule.name:>10}" for schedule in STANDARD))
    for mutant in MUTANTS:
        with tempfile.TemporaryDirectory() as folder:
            row = [f"{how or '-':>10}" for how in outcomes(mutant, Path(folder))]
        print(f"{mutant.name:{width}}", *row, flush=True)


if __name__ == "__main__":
    print_table()
