"""The cost of a layer's pieces: as measured where it was, and never absurd elsewhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_costs import GPT3, LLAMA

from flux_megatron.lab.perf import layer
from flux_megatron.lab.perf.collectives import all_reduce_us
from flux_megatron.lab.perf.hardware import A100, A100_PCIE, H100, H200, H800, of
from flux_megatron.launch.workload import Cluster, Link, Parallel, Training, Workload

MEASURED = Path(__file__).parents[2] / "docs" / "results" / "h200x4"
MODELS = {"gpt3-175b": GPT3, "llama2-70b": replace(LLAMA, seq_length=2048)}
LINEAR = ("qkv", "proj", "fc1", "fc2")
CLUSTERS = {
    "H200": Cluster("node", "H200-SXM5", 1, 4, 140.0, Link("nvlink", 450.0)),
    "H800": Cluster("h800", "H800-SXM5", 16, 8, 80.0, Link("nvlink", 200.0)),
    "A100": Cluster("a100", "A100-SXM4-80GB", 16, 8, 80.0, Link("nvlink", 300.0)),
    "A100 PCIe": Cluster("pcie", "A100-PCIE-80GB", 16, 8, 80.0, Link("pcie", 32.0)),
}


def workload(arm="flux", model="gpt3-175b", cluster="A100", tp=8, micro_batch=2, **training):
    training = Training(micro_batch, 16, 10, 2, **training)
    return Workload(MODELS[model], CLUSTERS[cluster], Parallel(tp), training, arm)


def linear_us(one: Workload) -> float:
    found = [piece for piece in layer.pieces(one) if piece.name in LINEAR]
    return sum(piece.forward_us + piece.backward_us for piece in found)


@pytest.fixture(scope="module")
def layers_us():
    """Linear operations of one layer, forward and backward, CUDA_DEVICE_MAX_CONNECTIONS=1."""
    rows = map(json.loads, (MEASURED / "layer_predictions.jsonl").read_text().splitlines())
    return {
        (row["model"], row["M"], row["strategy"]): row["measured_us"]
        for row in rows
        if row["connections"] == "1"
    }


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("M", [2048, 4096, 8192])
@pytest.mark.parametrize(("arm", "strategy"), [("megatron",) * 2, ("te",) * 2, ("flux", "auto")])
def test_the_linear_pieces_are_what_was_measured(layers_us, model, M, arm, strategy, monkeypatch):
    """Every arm with CUDA_DEVICE_MAX_CONNECTIONS=1, as Megatron asks for; rows are bursts."""
    monkeypatch.setattr(layer, "in_training", of)
    one = workload(arm, model, "H200", tp=4, micro_batch=M // 2048)
    assert linear_us(one) == pytest.approx(layers_us[model, M, strategy], rel=0.05)


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("model", MODELS)
def test_arms_differ_in_their_linear_layers_and_userbuffers_alone(cluster, model):
    arms = [layer.pieces(workload(arm, model, cluster)) for arm in ("megatron", "te", "flux")]
    names = ["qkv", "attention", "proj", "fc1", "activation", "fc2", "norms"]
    assert arms[1].pop().name == layer.USERBUFFERS
    assert [[piece.name for piece in arm] for arm in arms] == [names] * 3
    for megatron, te, flux in zip(*arms, strict=True):
        if megatron.name in LINEAR:
            assert flux.forward_us <= megatron.forward_us
            assert flux.backward_us <= megatron.backward_us
            assert 0 < flux.forward_exposed_us < flux.forward_us
            gemm_us = flux.forward_us - flux.forward_exposed_us
            assert te.forward_us - te.forward_exposed_us == pytest.approx(gemm_us)
        else:
            assert megatron == te == flux
            assert megatron.forward_exposed_us == megatron.backward_exposed_us == 0
            assert 0 < megatron.forward_us < megatron.backward_us


@given(
    st.sampled_from(["megatron", "te", "flux"]),
    st.sampled_from(["nvlink", "pcie"]),
    st.floats(0.1, 900),
)
def test_no_arm_hides_more_than_a_link_can_carry(arm, kind, bandwidth_gbps):
    """Six collectives of a layer's rows, two in the backward of each column layer."""
    cluster = replace(CLUSTERS["A100"], link=Link(kind, bandwidth_gbps))
    one = replace(workload(arm), cluster=cluster)
    moved = one.tokens * one.model.hidden * 2 * 7 / 8
    assert linear_us(one) > 10 * moved / (bandwidth_gbps * 1e3)
    slower = replace(one, cluster=replace(cluster, link=Link(kind, bandwidth_gbps / 2)))
    assert linear_us(slower) >= linear_us(one)


def test_one_rank_has_nothing_to_communicate():
    one = workload(tp=1)
    found = [*layer.pieces(one), layer.embedding(one), layer.head(one)]
    assert {piece.forward_exposed_us + piece.backward_exposed_us for piece in found} == {0}


def test_without_sequence_parallelism_rows_are_all_reduced():
    arms = {}
    for arm in ("megatron", "flux"):
        one = workload(arm)
        one = replace(one, parallel=replace(one.parallel, sequence_parallel=False))
        arms[arm] = {piece.name: piece for piece in layer.pieces(one)}
    all_reduce = all_reduce_us(A100, one.tokens * one.model.hidden * 2, 8)
    assert arms["megatron"]["fc2"].forward_exposed_us == pytest.approx(all_reduce)
    # `pipelined` exposes the gather, half of it, and the copy of y out of the gathered buffer
    assert 0 < arms["flux"]["fc2"].forward_exposed_us < 0.8 * all_reduce
    for pieces in arms.values():
        assert pieces["fc2"].backward_exposed_us == 0
        assert pieces["fc1"].forward_exposed_us == 0
        assert 0 < pieces["fc1"].backward_exposed_us < all_reduce
    with_it = {piece.name: piece for piece in layer.pieces(workload("flux"))}
    assert arms["flux"]["norms"].forward_us > 4 * with_it["norms"].forward_us


def test_recompute_adds_attention_or_the_whole_forward():
    times = {piece.name: piece.forward_us for piece in layer.pieces(workload())}
    assert layer.recompute_us(workload(recompute="selective")) == times["attention"]
    assert layer.recompute_us(workload(recompute="full")) == pytest.approx(sum(times.values()))


def test_the_head_is_ours_in_our_arm_alone_and_grows_with_the_vocabulary():
    ours, stock = layer.head(workload("flux")), layer.head(workload("megatron"))
    assert ours.forward_us < stock.forward_us
    assert ours.backward_us < stock.backward_us
    assert layer.head(workload("te")) == stock
    assert workload().padded_vocab == 51200  # of 50257, for 8 ranks
    small = workload()
    small = replace(small, model=replace(small.model, vocab=25000))
    assert layer.head(workload()).forward_us > 1.5 * layer.head(small).forward_us
    assert layer.embedding(workload()).backward_us > layer.embedding(small).backward_us


def test_adam_is_bound_by_memory():
    billion, two = (layer.optimizer_us(workload(), n * 10**9) - layer.HOST_US for n in (1, 2))
    assert billion == pytest.approx(54e9 / 1699 * 1e-3, rel=0.01)  # 54 bytes at 1.7 TB/s
    assert two == pytest.approx(2 * billion, rel=0.01)


@pytest.mark.parametrize(
    ("gpu", "link", "known"),
    [
        ("A100-PCIE-80GB", Link("pcie", 32.0), A100_PCIE),
        ("A100-SXM4-80GB", Link("nvlink", 300.0), A100),
        ("H800-SXM5", Link("nvlink", 200.0), H800),
        ("H200-SXM5", Link("nvlink", 450.0), H200),
        ("H100", Link("nvlink", 450.0), H100),
    ],
)
def test_a_cluster_has_the_facts_of_its_gpu(gpu, link, known):
    assert of(Cluster("c", gpu, 1, 8, 80.0, link)) == known


def test_bandwidths_follow_the_link():
    half = of(replace(CLUSTERS["H200"], link=Link("nvlink", 225.0)))
    assert half.copy_gbps == H200.copy_gbps / 2
    assert half.nccl_gbps == H200.nccl_gbps / 2
    assert half.memory_gbps == H200.memory_gbps
    gen5 = of(replace(CLUSTERS["A100 PCIe"], link=Link("pcie", 64.0)))
    assert gen5.nccl_gbps == gen5.copy_gbps == 2 * A100_PCIE.nccl_gbps


@pytest.mark.parametrize(("gpu", "link"), [("cpu", "memory"), ("L40S", "pcie"), ("cpu", "nvlink")])
def test_a_cluster_nobody_described_is_an_error(gpu, link):
    cluster = Cluster("mine", gpu, 1, 2, 4.0, Link(link, 10.0))
    with pytest.raises(
        ValueError, match=rf"cluster mine: gpu '{gpu}' on {link} given, one of H200"
    ):
        of(cluster)
