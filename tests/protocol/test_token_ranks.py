"""A token that travels once to a rank, under every standard schedule."""

from __future__ import annotations

import pytest
from interpreted_access import needs_interpreter
from mutants import not_of_mutants
from token_cases import TokenCase
from virtual_ranks import STANDARD

pytestmark = needs_interpreter

# beside those of mutants
CASES = [
    TokenCase(world_size=4, experts=1, calls=2, tokens=6),
    TokenCase(world_size=3, experts=2, topk=6, calls=2, tokens=6),  # all experts of all ranks
    TokenCase(tokens=1, calls=3),
    TokenCase(reverse=True, calls=2, world_size=3, tokens=6),
    TokenCase(captured=True, calls=3, tokens=6, topk=3),
]


@pytest.mark.parametrize("case", not_of_mutants(CASES), ids=str)
def test_every_schedule(package, case):
    for schedule in STANDARD:
        case.run(package, schedule)
