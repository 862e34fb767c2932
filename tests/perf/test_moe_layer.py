"""Layers with experts: parameters, FLOPs, times, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flux_megatron.lab.perf import flops, layer, moe_layer, network, step
from flux_megatron.lab.perf.hardware import in_training
from flux_megatron.launch import megatron_arguments, memory
from flux_megatron.launch.errors import ExperimentError, LaunchError
from flux_megatron.launch.experiment import load
from flux_megatron.launch.workload import Parallel

STUDY = "study/mixtral-8x7b_h200"
STOCK, OURS = (load(STUDY).arms[arm] for arm in ("megatron", "flux"))


def test_parameters_of_the_whole_model():
    """Mixtral 8x7B has 46.7e9 parameters, of which a token takes 12.9e9."""
    model = replace(STOCK.model, layers=32)
    each = memory.layer_parameters(model, Parallel(tp=1))
    whole = 32 * each + 2 * model.vocab * model.hidden + model.hidden
    assert whole == pytest.approx(46.7e9, rel=2e-3)
    experts = memory.expert_parameters(model, Parallel(tp=1))
    assert whole - 32 * experts * 6 // 8 == pytest.approx(12.9e9, rel=2e-3)
    quarter = memory.layer_parameters(model, Parallel(tp=1, dp=4, ep=4))
    assert each - quarter == experts * 3 // 4


def test_flops_are_of_the_experts_that_a_token_takes():
    dense = replace(STOCK, model=replace(STOCK.model, moe=None))
    model = STOCK.model
    mlp = 6 * 3 * model.layers * model.hidden * model.ffn
    router = 6 * model.layers * model.hidden * 8
    tokens = model.seq_length * STOCK.training.global_batch
    more = flops.model_flops(STOCK) - flops.model_flops(dense)
    assert more == pytest.approx((mlp + router) * tokens)


def test_pieces_of_both_arms():
    stock, ours = ({p.name: p for p in layer.pieces(w)} for w in (STOCK, OURS))
    assert [*stock][3:7] == ["router", "experts", "activation", "expert all-to-all"]
    assert stock["experts"] == ours["experts"]
    assert stock["expert all-to-all"].forward_us > 2 * ours["expert all-to-all"].forward_us
    waits = step.predict(STOCK).step_us - step.predict(_moe(host_sync=False)).step_us
    sync = 821.13  # once in each layer and micro-batch
    assert waits == pytest.approx(sync * STOCK.model.layers * STOCK.micro_batches)


def _moe(**changes):
    return replace(STOCK, model=replace(STOCK.model, moe=replace(STOCK.moe, **changes)))


def test_busy_experts_take_longer():
    busy = {p.name: p.forward_us for p in layer.pieces(_moe(imbalance=1.5))}
    even = {p.name: p.forward_us for p in layer.pieces(STOCK)}
    assert 1.3 * even["experts"] < busy["experts"] < 1.5 * even["experts"]
    assert busy["qkv"] == even["qkv"]


def test_alone_there_is_no_all_to_all():
    alone = replace(STOCK, parallel=Parallel(tp=1, dp=4, sequence_parallel=False))
    pieces = {p.name: p for p in layer.pieces(alone)}
    assert pieces["expert all-to-all"].forward_us == pytest.approx(0)
    hardware = in_training(alone.cluster)
    fc1 = moe_layer._experts(alone, 2 * 14336, 4096)
    assert pieces["experts"].forward_us > moe_layer.part_us("gemm", fc1, hardware)


def test_gradients_of_experts_are_summed_over_those_that_have_them():
    """With ep = dp nobody else has them; their share of the replicas' sum is gone."""
    cost = step.costs(STOCK)
    model, parallel = STOCK.model, STOCK.parallel
    whole = memory.parameters(STOCK, memory.stages(STOCK)[0])
    experts = model.layers * memory.expert_parameters(model, parallel)
    ((buckets,),) = cost.reduce_us
    assert sum(buckets) == pytest.approx(network.reduce_us(STOCK, whole - experts))


def test_memory_of_the_distributed_optimizer():
    """It shares what replicas have in common: with ep = dp no expert."""
    shared = replace(STOCK, training=replace(STOCK.training, distributed_optimizer=True))
    (stage,) = memory.stages(STOCK)
    whole = memory.parameters(STOCK, stage)
    experts = STOCK.model.layers * memory.expert_parameters(STOCK.model, STOCK.parallel)
    assert memory.updated(STOCK, stage) == whole
    assert memory.updated(shared, stage) == (whole - experts) // 4 + experts
    assert memory.workspace(OURS) > memory.workspace(STOCK) == 0


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model.moe.topk": 9}, "model.moe.topk: 9 given, at most model.moe.experts, 8"),
        ({"model.moe.experts": 6}, "model.moe.experts: 6 is not divisible by parallel.ep, 4"),
        (
            {"model.moe.imbalance": 0.5},
            "model.moe.imbalance: Input should be greater than or equal to 1, 0.5",
        ),
        ({"parallel.ep": 0}, "parallel.ep: Input should be greater than 0, 0 given"),
        ({"parallel.ep": 8}, "parallel.ep: 8 given, at most a node's GPUs, 4"),
        ({"parallel.tp": 2, "parallel.dp": 2}, "parallel.tp: 2 given, 1 expected with model.moe"),
        ({"model.moe.expert": 8}, "did you mean 'experts'?"),
    ],
)
def test_what_is_refused(values, words):
    with pytest.raises(ExperimentError) as caught:
        load(STUDY, values)
    assert words in str(caught.value)


def test_experts_are_not_launched_and_a_dense_model_has_no_ep():
    with pytest.raises(LaunchError, match="experts are simulated"):
        megatron_arguments.render(OURS)
    with pytest.raises(ExperimentError, match=r"parallel.ep: 4 given, model.moe expected"):
        load("node/gpt3-175b-4-layers_h200", {"parallel.ep": 4})
