"""The protocol of expert parallelism under every standard schedule. Its mutants, captured
calls, and those of `signalled`, are in `mutants.py`.
"""

from __future__ import annotations

import pytest
from expert_cases import ExpertCase
from interpreted_access import needs_interpreter
from virtual_ranks import STANDARD

pytestmark = needs_interpreter

CASES = [
    ExpertCase("dispatch", layout="nn", reverse=True),
    ExpertCase("combine", layout="nn"),
    ExpertCase("both", 1, experts=3),
    ExpertCase("combine", experts=3, calls=1, most=9, tma=True, reverse=True),
    ExpertCase("both", 4, experts=1, calls=2, most=9),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_experts(package, case):
    for schedule in STANDARD:
        case.run(package, schedule)
