"""The Hopper kernels of expert parallelism on virtual ranks, as `test_hopper_ranks` runs others:
under standard schedules, and with CTAs that get no SM before others have ended.
"""

from __future__ import annotations

import pytest
from expert_cases import ExpertCase
from interpreted_access import needs_interpreter
from virtual_ranks import STANDARD, Schedule

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

pytestmark = needs_interpreter
CASES = [
    ExpertCase("dispatch", layout="nn", calls=2, most=12, hopper=True),
    ExpertCase("combine", layout="nn", calls=2, hopper=True, reverse=True),
    ExpertCase("both", 1, experts=3, calls=2, hopper=True, reverse=True),
    ExpertCase("both", 3, experts=1, calls=2, most=9, hopper=True),
]
HELD = [
    Schedule(f"{resident} resident", "random", seed, resident, any_order=True)
    for seed, resident in enumerate((1, 1, 2))
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_are_exact(package, case):
    for schedule in (*STANDARD[::2], *HELD):
        case.run(package, schedule)


def test_captured(package):
    ExpertCase("both", experts=1, calls=3, most=9, captured=True, hopper=True).run(
        package, STANDARD[-1]
    )
