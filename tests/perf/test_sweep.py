"""The same training on other numbers of GPUs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_costs import A100, WORKLOAD, with_

from flux_megatron.perf import memory, schedule, step, sweep
from flux_megatron.perf.workload import Nics

NUMBERS = [8 << n for n in range(12)]  # 8 .. 16384
POINTS = sweep.points(WORKLOAD, NUMBERS)


def test_every_split_uses_all_gpus_keeps_the_batch_and_fits():
    assert [point.gpus for point in POINTS] == NUMBERS
    for point in POINTS:
        if point.workload is None or point.step is None:
            continue
        workload = point.workload
        assert workload.parallel.world_size == workload.cluster.gpus == point.gpus
        assert workload.training == WORKLOAD.training
        assert memory.estimate(workload).fits(A100)
        assert sum(point.step.parts.values()) == pytest.approx(point.step.step_us)


def test_few_gpus_cannot_hold_the_model():
    assert "the leanest split needs" in POINTS[0].reason
    assert POINTS[0].step is None
    assert all(point.step for point in POINTS if point.gpus >= 128)


def test_more_gpus_are_faster_by_less_and_less():
    times = [point.step.step_us for point in POINTS if point.step]
    gains = [one / two for one, two in pairwise(times)]
    assert all(gain > 1 for gain in gains)
    assert gains[-1] < 1.3 < gains[0]


def test_the_best_split_is_no_slower_than_the_papers():
    papers = step.predict(WORKLOAD, schedule.closed_form).step_us
    best = sweep.best(WORKLOAD, 128).step
    assert best is not None
    assert best.step_us <= papers


def test_interleaving_is_offered_where_it_divides():
    interleaved = with_(WORKLOAD, "parallel", virtual_stages=3)
    chosen = sweep.best(interleaved, 1024).workload
    assert chosen is not None
    assert chosen.parallel.virtual_stages == 3
    chosen = sweep.best(with_(WORKLOAD, "parallel", virtual_stages=5), 1024).workload
    assert chosen is not None
    assert chosen.parallel.virtual_stages == 1


def test_where_each_kind_begins_to_cost():
    assert sweep.costly_from(POINTS, ("pp", "bubble"), 0.1) in NUMBERS[6:]
    assert sweep.costly_from(POINTS, ("pp", "bubble"), 1.0) is None
    assert sweep.costly_from(POINTS, ("tp",), 0.0) == next(p.gpus for p in POINTS if p.step)


@pytest.mark.parametrize(("gpus", "nodes", "per_node"), [(4, 1, 4), (8, 1, 8), (64, 8, 8)])
def test_a_cluster_grows_by_nodes(gpus, nodes, per_node):
    cluster = sweep.resized(A100, gpus)
    assert (cluster.nodes, cluster.gpus_per_node) == (nodes, per_node)


def test_gpus_that_fill_no_nodes():
    with pytest.raises(ValueError, match="12 GPUs do not fill nodes of 8"):
        sweep.resized(A100, 12)


def test_a_batch_that_nothing_divides():
    odd = with_(WORKLOAD, "training", global_batch=2)
    assert "divides heads, layers and batch" in sweep.best(odd, 16384).reason


def test_cards_between_sites():
    assert sweep.with_nics(A100, None, None) == A100
    assert sweep.with_nics(A100, 1.0, 20_000.0).nics == Nics(4, 0.125, 20_000.0)
    assert sweep.with_nics(replace(A100, nics=None), 400.0, None).nics == Nics(1, 50.0)


@settings(max_examples=25)
@given(st.sampled_from([128, 1024, 8192]), st.floats(0.1, 400.0), st.floats(1.1, 10.0))
def test_slower_links_never_help(gpus, gbit, factor):
    fast, slow = (
        sweep.best(replace(WORKLOAD, cluster=sweep.with_nics(A100, g, None)), gpus).step
        for g in (gbit * factor, gbit)
    )
    assert fast is not None
    assert slow is not None
    assert slow.step_us >= fast.step_us
