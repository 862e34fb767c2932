"""Own kernels under every standard schedule; and broken copies, of the tutorial's kernel and of the
primitives, that must fail there.

`device_mutants.diff` lists them as `mutants.diff` does.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
from device_ranks import KERNELS, OwnCase, run
from interpreted_access import needs_interpreter
from memory_checker import OutOfBounds
from mutants import Mutant, hunks
from protocol_cases import WrongResult
from virtual_machine import PackageCopy, mutated
from virtual_ranks import STANDARD, Deadlock, Schedule

pytestmark = needs_interpreter

CASES = {
    "norm": OwnCase(),
    "norm, 3 ranks": OwnCase(world_size=3, calls=2),
    "norm, 1 rank": OwnCase(world_size=1, calls=2),
    "largest epoch as a signed word": OwnCase(last_epoch=2**31 - 3),
    "largest epoch": OwnCase("barrier", last_epoch=2**32 - 3),
    "captured": OwnCase(M_shard=3, calls=6, captured=True),
    "barrier": OwnCase("barrier", 3, calls=4),
    "captured barrier": OwnCase("barrier", calls=6, captured=True),
}
DEVICE_MUTANTS = [
    Mutant(title, CASES[case], mutation)
    for title, case, mutation in hunks(Path(__file__).with_name("device_mutants.diff"), "case")
]
OF_KERNELS = {file.name for file in KERNELS.values()}


@pytest.mark.parametrize("case", CASES)
def test_exact(package, case):
    for schedule in STANDARD[::2]:
        run(CASES[case], package, schedule)


def is_caught(mutant: Mutant, package: PackageCopy, schedule: Schedule) -> bool:
    try:
        run(mutant.case, package, schedule, mutant.mutation)
    except (Deadlock, OutOfBounds, WrongResult):
        return True
    return False


@pytest.mark.parametrize("mutant", DEVICE_MUTANTS, ids=str)
def test_mutant_is_caught(mutant, tmp_path, package):
    soonest_first = (STANDARD[0], *STANDARD[:0:-1])
    of_kernel = mutant.mutation.path in OF_KERNELS
    with nullcontext(package) if of_kernel else mutated(mutant.mutation, tmp_path) as copy:
        assert any(is_caught(mutant, copy, one) for one in soonest_first), mutant.name
