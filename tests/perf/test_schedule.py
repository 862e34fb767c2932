"""The order in which pipeline ranks compute, and the closed form by hand."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_costs import WORKLOAD, uniform, with_

from flux_megatron.perf import memory
from flux_megatron.perf.schedule import Op, closed_form, order


def words(ops: list[Op]) -> str:
    """`F2` is the third micro-batch's forward, `B2'` its backward through the second chunk."""
    return " ".join(f"{op.kind[0].upper()}{op.micro_batch}{chr(39) * op.chunk}" for op in ops)


def test_1f1b_of_three_ranks():
    assert words(order(3, 0, 4)) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert words(order(3, 1, 4)) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert words(order(3, 2, 4)) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_interleaved_1f1b_of_two_ranks():
    """Rank 0 runs ahead by 2 (p - 1) + (v - 1) p = 4 forwards."""
    first = "F0 F1 F0' F1' F2 B0' F3 B1' F2' B0 F3' B1 B2' B3' B2 B3"
    assert words(order(2, 0, 4, chunks=2)) == first
    second = "F0 F1 F0' B0' F1' B1' F2 B0 F3 B1 F2' B2' F3' B3' B2 B3"
    assert words(order(2, 1, 4, chunks=2)) == second


def test_fewer_micro_batches_than_ranks():
    assert words(order(4, 0, 2)) == "F0 F1 B0 B1"
    assert words(order(4, 3, 2)) == "F0 B0 F1 B1"


def test_micro_batches_that_cannot_be_interleaved():
    with pytest.raises(ValueError, match="6 micro-batches do not divide by 4 pipeline stages"):
        order(4, 0, 6, chunks=2)


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 4), st.data())
def test_every_rank_computes_everything_once_and_backward_after_forward(pp, groups, chunks, data):
    chunks = chunks if pp > 1 else 1
    rank = data.draw(st.integers(0, pp - 1))
    ops = order(pp, rank, groups * pp, chunks)
    assert len(set(ops)) == len(ops) == 2 * groups * pp * chunks
    for index, op in enumerate(ops):
        assert op.kind == "forward" or op._replace(kind="forward") in ops[:index]
    held = accumulate(1 if op.kind == "forward" else -1 for op in ops)
    parallel = {"pp": pp, "dp": 1, "virtual_stages": chunks}
    workload = with_(WORKLOAD, "parallel", **parallel)
    workload = with_(workload, "training", global_batch=2 * groups * pp)
    assert max(held) == memory.in_flight(workload, rank)


def test_the_bubble_is_p_minus_1_of_m():
    """(p - 1) (f + b), divided by the chunks of a rank: Narayanan et al., section 2.2."""
    parts = closed_form(uniform(4, 16, 10.0, 20.0))
    assert (parts.compute_us, parts.bubble_us) == (16 * 30.0, 3 * 30.0)
    interleaved = closed_form(uniform(4, 16, 5.0, 10.0, chunks=2))
    assert (interleaved.compute_us, interleaved.bubble_us) == (16 * 30.0, 3 * 30.0 / 2)


def test_sends_of_two_ranks():
    """F0, send; then in each turn one send for both directions; the last gradient's way back."""
    assert closed_form(uniform(2, 1, 10.0, 20.0, send=3.0)).pp_us == 2 * 3.0
    assert closed_form(uniform(2, 8, 10.0, 20.0, send=3.0)).pp_us == (2 + 7) * 3.0


def test_a_rank_with_two_neighbours_sends_twice_a_turn():
    assert closed_form(uniform(4, 1, 10.0, 20.0, send=3.0)).pp_us == 2 * 3 * 3.0
    one, more = (closed_form(uniform(4, m, 10.0, 20.0, send=3.0)).pp_us for m in (10, 11))
    assert more - one == 2 * 3.0


def test_interleaved_sends_cost_the_way_there_and_back_only():
    for micro_batches in (4, 40):
        parts = closed_form(uniform(4, micro_batches, 10.0, 20.0, send=3.0, chunks=2))
        assert parts.pp_us == 2 * (4 * 2 - 1) * 3.0


def test_replicas_without_overlap():
    """The first rank is done last: all of its sum is exposed, then its gather."""
    replicas = {"reduce_us": (((50.0,),),) * 4, "gather_us": (((25.0,),),) * 4}
    parts = closed_form(uniform(4, 8, 10.0, 20.0, **replicas, tied_us=7.0))
    assert parts.dp_us == 50.0 + 7.0 + 25.0
    long = {"reduce_us": (((50.0,),),) * 3 + (((200.0,),),)}
    assert closed_form(uniform(4, 8, 10.0, 20.0, **long)).dp_us == 200.0 - 3 * 20.0


def test_buckets_hide_behind_the_last_backward_and_the_first_forward():
    first, others = (((5.0,) * 4,),), (((20.0,),),) * 3
    shown = {"reduce_us": first + others, "overlap_reduce": True}
    assert closed_form(uniform(4, 8, 10.0, 20.0, **shown)).dp_us == 5.0  # of 4 buckets the last
    shown = {"gather_us": first + others, "overlap_gather": True}
    # rank 0's buckets take 20, the last quarter of its forward begins at 7.5; rank 1 needs 20 at 10
    assert closed_form(uniform(4, 8, 10.0, 20.0, **shown)).dp_us == 20.0 - 7.5
