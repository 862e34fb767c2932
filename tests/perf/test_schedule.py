"""The closed form of pipeline schedules, by hand."""

from __future__ import annotations

from step_costs import uniform

from flux_megatron.lab.perf.schedule import closed_form


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
