"""The Hopper kernels of every operation with every number of ranks, forward and as dgrad: what
`flux-megatron doctor --strategies` says of them without a GPU. The protocol's own cases are in
`test_hopper_ranks.py` and `test_hopper_expert_ranks.py`.
"""

from __future__ import annotations

import pytest
from expert_cases import ExpertCase
from interpreted_access import needs_interpreter
from protocol_cases import Case
from virtual_ranks import Schedule

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

pytestmark = needs_interpreter
LATE = Schedule("one rank late", "random", seed=3, resident=2, any_order=True, late=True)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_ag_gemm(package, world_size):
    for layout in ("nt", "nn"):
        for given in ({}, {"K": 48, "parts": 3}):
            case = Case("ag", "hopper", world_size, (16, 32), N=16, layout=layout, ctas=2, **given)
            case.run(package, LATE)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_gemm_rs(package, world_size):
    for layout in ("nt", "nn"):
        Case("rs", "hopper", world_size, (7, 20), N=16, layout=layout, ctas=2).run(package, LATE)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_gemm_ar(package, world_size):
    for layout in ("nt", "nn"):
        Case("ar", "hopper", world_size, (7, 20), N=16, layout=layout, ctas=2).run(package, LATE)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_experts(package, world_size):
    """The dgrad of each operation is the other one with the other layout."""
    few = 2 if world_size < 4 else 1
    for layout in ("nt", "nn"):
        case = ExpertCase("both", world_size, few, few, most=9, layout=layout, ctas=2, hopper=True)
        case.run(package, LATE)
