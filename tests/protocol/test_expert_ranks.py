"""The protocol of expert parallelism under every standard schedule. Its mutants are in
`mutants.diff`.
"""

from __future__ import annotations

import pytest
from expert_cases import ExpertCase
from interpreted_access import needs_interpreter
from virtual_product import Product
from virtual_ranks import STANDARD

pytestmark = needs_interpreter

CASES = [
    ExpertCase("dispatch", layout="nn"),
    ExpertCase("combine", layout="nn"),
    ExpertCase("both", 1, experts=3),
    ExpertCase("both", 3, experts=1, most=12),
    ExpertCase("both", experts=1, calls=6, captured=True),
]


@pytest.fixture(scope="module")
def product() -> Product:
    return Product("flux_megatron")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_experts(product, case):
    for schedule in STANDARD:
        case.run(product, schedule)
