"""Problems distinguish local from global sizes; plans survive their text."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flux_megatron.problem import Pattern, Plan, Problem, Tile

SIZES = st.sampled_from([16, 32, 64, 128, 256])
TILES = st.builds(
    Tile, block_m=SIZES, block_n=SIZES, block_k=SIZES, group_m=st.integers(1, 16),
    num_warps=st.sampled_from([4, 8]), num_stages=st.integers(1, 5), tma=st.booleans(),
)  # fmt: skip
PLANS = st.builds(
    Plan, strategy=st.sampled_from(["hopper", "fused", "pipelined", "sequential"]),
    comm_rows=st.integers(0, 10**6), tile=TILES, splits=st.integers(0, 8),
    transport=st.sampled_from(["copy_engine", "sm"]),
    group_rows=st.lists(st.integers(1, 512), max_size=15).map(tuple), comm_sms=st.integers(0, 64),
)  # fmt: skip


@given(PLANS)
def test_a_plan_survives_its_text(plan):
    assert Plan.loads(plan.dumps()) == plan


@given(PLANS, PLANS)
def test_different_plans_have_different_texts(one, other):
    assert (one == other) == (one.dumps() == other.dumps())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"comm_rows": 0}',
        '{"strategy": "fused", "chunks": 4}',
        '{"strategy": "fused", "comm_rows": 0, "tile": {"block": 1}}',
    ],
)
def test_other_texts_are_no_plans(text):
    with pytest.raises((ValueError, KeyError, TypeError)):
        Plan.loads(text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"transport": "nvlink"}, "'nvlink' given, one of"),
        ({"comm_rows": -1}, "comm_rows -1"),
        ({"splits": -2}, "splits -2"),
        ({"comm_sms": -1}, "comm_sms -1"),
        ({"group_rows": (16, 0)}, r"group_rows \(16, 0\)"),
        ({"group_rows": (1,) * 16}, "at most 15 sizes"),
    ],
)
def test_a_wrong_plan_says_what_is_wrong(fields, message):
    with pytest.raises(ValueError, match=message):
        Plan("hopper", **fields)


def test_what_a_text_leaves_out_is_a_default():
    """Plans that were written before a field was added stay what they were."""
    assert Plan.loads('{"strategy": "fused"}') == Plan("fused")
    text = '{"strategy": "fused", "comm_rows": 8, "tile": {"block_n": 256}}'
    assert Plan.loads(text) == Plan("fused", 8, Tile(block_n=256))


def test_plans_and_problems_are_keys():
    assert {Plan("fused"): 1}[Plan("fused", 0, Tile())] == 1
    assert len({Plan("fused"), Plan("fused", 1), Plan("pipelined"), Plan("fused")}) == 3
    with pytest.raises(FrozenInstanceError):
        Plan("fused").comm_rows = 3


def test_local_sizes():
    gather = Problem(Pattern.AG_GEMM, M=24, N=40, K=16, dtype="bfloat16", world_size=4)
    assert (gather.M_shard, gather.N_local, gather.K_local) == (6, 10, 16)
    scatter = Problem(Pattern.GEMM_RS, M=24, N=40, K=16, dtype="bfloat16", world_size=4)
    assert (scatter.M_shard, scatter.N_local, scatter.K_local) == (6, 40, 4)


def test_a_problem_says_all_that_it_is():
    problem = Problem(Pattern.GEMM_RS, 24, 40, 16, "float16", 4, layout="nn", device="cpu")
    assert str(problem) == "gemm_rs M=24 N=40 K=16 nn float16 over 4 ranks on cpu"
    assert str(replace(problem, beside=True)) == f"{problem}, beside others"
    assert str(Pattern.AG_GEMM) == Pattern.AG_GEMM == "ag_gemm"
