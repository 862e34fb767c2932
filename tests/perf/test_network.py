"""What leaves a GPU for other stages and replicas: placement, shared cards, bytes, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_costs import A100, WORKLOAD, with_

from flux_megatron.lab.perf import hardware, network
from flux_megatron.lab.perf.collectives import collective_us
from flux_megatron.launch.workload import Nics, Parallel

CARD = 0.9 * 25.0  # GB/s that NCCL gets of one of 4 cards of 200 Gb/s


def test_eight_gpus_that_send_share_four_cards():
    """Tensor 8 x data 2 fill two nodes: every stage sends to other nodes."""
    rows = 2048 * 2 // 8 * 12288 * 2  # with sequence parallelism a rank sends its own
    for rank in range(8):
        expected = 5.0 + rows / (CARD / 2) * 1e-3
        assert network.send_us(WORKLOAD, rank) == pytest.approx(expected)
    whole = with_(WORKLOAD, "parallel", sequence_parallel=False)
    assert network.send_us(whole, 0) == pytest.approx(5.0 + 8 * rows / (CARD / 2) * 1e-3)


def test_nobody_sends_faster_than_a_card():
    assert network.share_gbps(Nics(8, 50.0), 2) == 0.9 * 50.0
    assert network.share_gbps(Nics(2, 12.5), 8) == pytest.approx(0.9 * 25.0 / 8)


def test_stages_of_one_node_send_over_its_link():
    """Tensor 4: stages 0 and 1 lie on one node, 2 is on the next."""
    small = replace(WORKLOAD, parallel=Parallel(tp=4, pp=4, dp=1))
    rows = 2048 * 2 // 4 * 12288 * 2
    gpu = hardware.of(A100)
    inside = gpu.nccl_latency_us + rows / gpu.nccl_gbps * 1e-3
    outside = 5.0 + rows / CARD * 1e-3  # four GPUs, four cards
    found = [network.send_us(small, rank) for rank in range(3)]
    assert found == pytest.approx([inside, outside, inside])
    assert network.send_us(replace(small, parallel=Parallel(tp=8)), 0) == 0.0


def test_replicas_of_two_nodes():
    """Eight rings of two, one for each tensor rank, through four cards; fp32 sums, bf16 gathers."""
    latency = hardware.of(A100).nccl_latency_us + 2 * 5.0
    one = 10**9 / 2 / (CARD / 2) * 1e-3
    assert network.reduce_us(WORKLOAD, 10**9) == pytest.approx(latency + 4 * one)
    assert network.gather_us(WORKLOAD, 10**9) == pytest.approx(latency + 2 * one)
    plain = with_(WORKLOAD, "training", distributed_optimizer=False)
    assert network.reduce_us(plain, 10**9) == pytest.approx(2 * (latency + 4 * one))
    assert network.gather_us(plain, 10**9) == 0.0


def test_replicas_inside_a_node_use_its_link():
    inside = replace(WORKLOAD, parallel=Parallel(tp=2, pp=1, dp=4))
    expected = collective_us(hardware.of(A100), 4 * 10**9, 4)
    assert network.reduce_us(inside, 10**9) == expected
    assert network.reduce_us(replace(WORKLOAD, parallel=Parallel(tp=8, pp=16)), 10**9) == 0.0


def test_several_replicas_of_a_node_cross_its_border_once():
    """Tensor 2: four replicas on each of two nodes; two rings, each with two of the four cards."""
    spread = replace(WORKLOAD, parallel=Parallel(tp=2, pp=1, dp=8))
    latency = hardware.of(A100).nccl_latency_us + 2 * 5.0
    received = 4 * 10**9 * 7 / 8
    assert network.reduce_us(spread, 10**9) == pytest.approx(latency + received / (2 * CARD) * 1e-3)


def test_a_tied_table_is_summed_between_the_ends_of_the_pipeline():
    table = 10**8
    expected = 5.0 + 4 * table / (CARD / 2) * 1e-3
    assert network.tied_embeddings_us(WORKLOAD, table) == pytest.approx(expected)
    untied = replace(WORKLOAD, model=replace(WORKLOAD.model, tied_embeddings=False))
    assert network.tied_embeddings_us(untied, table) == 0.0


def test_nodes_without_cards():
    alone = replace(WORKLOAD, cluster=replace(A100, nics=None))
    with pytest.raises(ValueError, match="cluster a100 has no network cards"):
        network.send_us(alone, 0)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([2, 4, 16, 64]), st.integers(1, 8))
def test_more_cards_never_take_longer(tp, dp, count):
    workload = replace(WORKLOAD, parallel=Parallel(tp=tp, pp=2, dp=dp))
    times = []
    for number in (count, count + 1):
        cluster = replace(A100, nics=Nics(number, 25.0))
        carded = replace(workload, cluster=cluster)
        times.append((network.reduce_us(carded, 10**8), network.send_us(carded, 0)))
    assert times[1] <= times[0]
