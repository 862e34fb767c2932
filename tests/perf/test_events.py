"""The event simulation: its engine, and its agreement with the closed form."""

from __future__ import annotations

from dataclasses import astuple, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_costs import uniform

from flux_megatron.perf import events, simulation
from flux_megatron.perf.events import Deadlock, Stream, Task
from flux_megatron.perf.schedule import Costs, closed_form, order

ONE, TWO, LINK = Stream("compute", 0), Stream("compute", 1), Stream("link", 0, 1)


def spans(*tasks: Task) -> list[tuple[float, float]]:
    return [(task.start_us, task.end_us) for task in tasks]


def test_a_stream_keeps_its_order_and_tasks_wait_for_what_they_need():
    first, second = Task("forward", "0", (ONE,), 5.0), Task("forward", "1", (ONE,), 5.0)
    sent = Task("send", "", (LINK,), 2.0, [first])
    other = Task("forward", "0", (TWO,), 1.0, [sent])
    queues = {TWO: [other], LINK: [sent], ONE: [first, second]}
    assert events.run(queues) == 10.0
    assert spans(first, second, sent, other) == [(0, 5), (5, 10), (5, 7), (7, 8)]


def test_a_task_of_two_streams_begins_when_both_have_come_to_it():
    early, late = Task("forward", "", (ONE,), 1.0), Task("forward", "", (TWO,), 4.0)
    both = Task("send", "", (ONE, TWO), 2.0)
    after = Task("backward", "", (ONE,), 1.0)
    assert events.run({ONE: [early, both, after], TWO: [late, both]}) == 7.0
    assert spans(both, after) == [(4, 6), (6, 7)]


def test_tasks_that_need_each_other_are_a_deadlock():
    one, two = Task("forward", "7", (ONE,), 1.0), Task("forward", "8", (TWO,), 1.0)
    one.needs, two.needs = [two], [one]
    with pytest.raises(Deadlock, match="compute of rank 0: forward 7, compute of rank 1: forward"):
        events.run({ONE: [one], TWO: [two]})


def test_ranks_that_meet_in_different_orders_are_a_deadlock():
    a, b = Task("send", "a", (ONE, TWO), 1.0), Task("send", "b", (ONE, TWO), 1.0)
    with pytest.raises(Deadlock, match="rank 0: send a, compute of rank 1: send b"):
        events.run({ONE: [a, b], TWO: [b, a]})


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_wrong_schedule_is_a_deadlock_and_no_hang(monkeypatch, chunks):
    def wrong(pp: int, rank: int, micro_batches: int, chunks: int):
        ops = order(pp, rank, micro_batches, chunks)
        return ops if rank else ops[::-1]  # rank 0 begins with what must come last

    monkeypatch.setattr(simulation, "order", wrong)
    with pytest.raises(Deadlock, match="compute of rank 0"):
        simulation.simulate(uniform(4, 8, 1.0, 2.0, chunks=chunks))


def test_nobody_runs_two_things_at_once_and_nothing_before_what_it_needs():
    costs = uniform(4, 8, 1.0, 2.0, send=0.5, chunks=2)
    tasks = simulation.simulate(costs).tasks
    by_stream: dict[Stream, list[Task]] = {}
    for task in tasks:
        assert all(task.start_us >= other.end_us for other in task.needs)
        for stream in task.streams:
            by_stream.setdefault(stream, []).append(task)
    for queue in by_stream.values():
        ordered = sorted(queue, key=lambda task: task.start_us)
        for before, after in pairwise(ordered):
            assert before.end_us <= after.start_us
    assert {stream.kind for stream in by_stream} == {"compute", "link"}


def test_what_a_step_of_two_ranks_takes_by_hand():
    """F 10, B 20, send 3: rank 1 is at work from 13 to 103, with a send in each of 2 turns."""
    parts = simulation.simulate(uniform(2, 3, 10.0, 20.0, send=3.0)).parts
    assert parts.step_us == 10 + 3 + 30 + 3 + 30 + 3 + 30 + 3 + 20
    assert astuple(parts) == (90.0, 30.0, 12.0, 0.0, 0.0)


def test_a_gradient_takes_as_long_as_what_it_is_the_gradient_of():
    """Only the way between ranks 0 and 1 takes time: once there, once back."""
    costs = replace(uniform(3, 1, 1.0, 2.0), send_us=(5.0, 0.0, 0.0))
    assert simulation.simulate(costs).parts.pp_us == 2 * 5.0


@st.composite
def uniform_costs(draw: st.DrawFn) -> Costs:
    """Equal ranks with sends, replicas in buckets, and an optimizer; sends no longer than either
    pass, where the closed form is exact.
    """
    pp = draw(st.integers(1, 6))
    chunks = draw(st.integers(1, 3)) if pp > 1 else 1
    micro_batches = draw(st.integers(1, 4)) * pp if chunks > 1 else draw(st.integers(1, 14))
    times = st.floats(1.0, 50.0)
    forward, backward = draw(times), draw(times)
    send = draw(st.floats(0.0, 1.0)) * min(forward, backward)

    def replicas() -> tuple[tuple[tuple[float, ...], ...], ...]:
        all_us, buckets = draw(st.floats(0.0, 200.0)), draw(st.integers(1, 4))
        one = (all_us,)
        split = (all_us / buckets,) * buckets
        return ((split, *(one,) * (chunks - 1)), *((one,) * chunks,) * (pp - 1))

    return uniform(
        pp, micro_batches, forward, backward, chunks=chunks, send=send,
        reduce_us=replicas(), gather_us=replicas(),
        optimizer_us=tuple(draw(times) for _ in range(pp)),
        tied_us=draw(st.sampled_from([0.0, 30.0])) if pp > 1 else 0.0,
        overlap_reduce=draw(st.booleans()), overlap_gather=draw(st.booleans()),
    )  # fmt: skip


@given(uniform_costs())
def test_both_forms_agree_where_ranks_are_equal(costs):
    simulated, closed = simulation.simulate(costs).parts, closed_form(costs)
    assert astuple(simulated) == pytest.approx(astuple(closed), rel=1e-6, abs=1e-6)


@st.composite
def uneven_costs(draw: st.DrawFn) -> Costs:
    """A head that is up to half a stage, an embedding up to a twentieth, and uneven sends."""
    pp, chunks = draw(st.integers(2, 6)), draw(st.integers(1, 3))
    micro_batches = draw(st.integers(2, 12)) * pp
    first, last = draw(st.floats(0.0, 0.05)), draw(st.floats(0.0, 0.5))
    passes = []
    for time_us in (1.0, 2.0):
        rows = [[time_us] * chunks for _ in range(pp)]
        rows[0][0] += first * time_us
        rows[-1][-1] += last * time_us
        passes.append(tuple(map(tuple, rows)))
    return replace(
        uniform(pp, micro_batches, 1.0, 2.0, chunks=chunks),
        forward_us=passes[0],
        backward_us=passes[1],
        send_us=tuple(draw(st.floats(0.0, 0.05)) for _ in range(pp)),
    )


@given(uneven_costs())
def test_both_forms_stay_close_with_an_embedding_and_a_head(costs):
    simulated, closed = simulation.simulate(costs).parts, closed_form(costs)
    assert closed.step_us == pytest.approx(simulated.step_us, rel=0.05)


@given(uneven_costs())
def test_a_long_step_is_extrapolated_from_its_steady_state(costs):
    whole = simulation.simulate(costs).parts.step_us
    assert simulation.extrapolate(costs).step_us == pytest.approx(whole, rel=0.02)
