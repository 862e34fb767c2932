"""A whole predicted step: its parts, against hand-made layers, and what they must do."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from step_costs import A100, WORKLOAD, uniform, with_

from flux_megatron.lab.perf import flops, layer, step
from flux_megatron.lab.perf.layer import Piece
from flux_megatron.lab.perf.schedule import closed_form
from flux_megatron.launch import memory
from flux_megatron.launch.workload import Cluster, Link, Nics, Parallel

PCIE = Cluster(
    "pcie", "A100-PCIE-80GB", nodes=16, gpus_per_node=8, memory_gib=80.0,
    link=Link("pcie", 32.0), nics=Nics(2, 12.5),
)  # fmt: skip
H800 = replace(
    A100, name="h800", gpu="H800-SXM5", link=Link("nvlink", 200.0), nics=Nics(8, 50.0)
)  # fmt: skip


@pytest.fixture
def plain_layers(monkeypatch):
    """Layers of 10 us forward, 1 of it communication, and 20 backward, 4 of it; nothing else."""
    both = [Piece("fc1", 6.0, 15.0, 1.0, 4.0), Piece("attention", 4.0, 5.0)]
    monkeypatch.setattr(layer, "pieces", lambda workload: both)
    for name in ("embedding", "head"):
        monkeypatch.setattr(layer, name, lambda workload, name=name: Piece(name, 0.0, 0.0))
    monkeypatch.setattr(layer, "optimizer_us", lambda workload, parameters: 1000.0)


ALONE = replace(
    with_(WORKLOAD, "training", global_batch=768),
    parallel=Parallel(tp=8, pp=8),
    cluster=replace(A100, nics=Nics(4, 1e12, 0.0)),
)


def test_a_step_by_hand(plain_layers):
    """8 stages of 12 layers, 384 micro-batches: (384 + 7) x 12 x 30 us."""
    found = step.predict(ALONE)
    assert found.step_us == pytest.approx(391 * 12 * 30.0 + 1000.0)
    exposed = {"tp": 384 * 12 * 5.0, "pp": 0.0, "dp": 0.0, "bubble": 7 * 12 * 30.0}
    assert found.exposed == pytest.approx(exposed, abs=0.1)
    assert found.parts["fc1"] == pytest.approx(384 * 12 * 16.0)
    assert found.parts["attention"] == pytest.approx(384 * 12 * 9.0)
    assert found.tokens_per_second == pytest.approx(768 * 2048 / found.step_us * 1e6)
    assert found.mfu == flops.mfu(ALONE, found.step_us * 1e-6)


def test_recomputation_is_backward_of_every_layer(plain_layers, monkeypatch):
    monkeypatch.setattr(layer, "recompute_us", lambda workload: 7.0)
    full = step.predict(with_(ALONE, "training", recompute="full"))
    assert full.step_us == pytest.approx(391 * 12 * 37.0 + 1000.0)
    assert full.parts["recomputation"] == pytest.approx(384 * 12 * 7.0)


@pytest.mark.parametrize("cluster", [A100, PCIE, H800], ids=lambda cluster: cluster.name)
def test_ours_is_never_slower_than_megatron(cluster):
    stock, ours = (step.predict(replace(WORKLOAD, cluster=cluster, arm=arm))
                   for arm in ("megatron", "flux"))  # fmt: skip
    assert ours.step_us < stock.step_us
    difference = stock.step_us - ours.step_us
    hidden = stock.exposed["tp"] - ours.exposed["tp"]
    waits = stock.exposed["bubble"] - ours.exposed["bubble"]  # of which stages have as much less
    assert difference == pytest.approx(hidden + waits, rel=0.02)


def test_overlap_hides_data_parallel_communication():
    plain = step.predict(WORKLOAD).exposed["dp"]
    reduced = with_(WORKLOAD, "training", overlap_grad_reduce=True)
    both = with_(reduced, "training", overlap_param_gather=True)
    hidden = [step.predict(workload).exposed["dp"] for workload in (reduced, both)]
    assert plain > hidden[0] > hidden[1] >= 0


def test_buckets_are_those_of_megatron():
    """40 million parameters each on the first stage; the others are not the last to end."""
    overlapped = with_(WORKLOAD, "training", overlap_grad_reduce=True)
    first = memory.parameters(WORKLOAD, memory.stages(WORKLOAD)[0])
    counts = [len(rank[0]) for rank in step.costs(overlapped).reduce_us]
    assert counts == [math.ceil(first / 40e6)] + [1] * 7
    assert [len(rank[0]) for rank in step.costs(WORKLOAD).reduce_us] == [1] * 8


def test_what_cannot_be_predicted():
    with pytest.raises(ValueError, match="a global batch of 2 is no micro-batch of 2 for each"):
        step.predict(with_(WORKLOAD, "training", global_batch=2))


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
