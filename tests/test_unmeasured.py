"""Which plan a call gets that nobody has measured: a model's, a neighbour's, and with what care."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flux_megatron.kernels import hopper_config
from flux_megatron.perf import hardware
from flux_megatron.perf.operator_cost import predict_us
from flux_megatron.problem import Pattern, Plan, Problem
from flux_megatron.tuning import choice, environment, plan_cache
from flux_megatron.tuning.plan_entry import Entry, Measured

PLAIN = Plan("sequential")
LAYER = Problem(Pattern.AG_GEMM, 8192, 49152, 12288, "bfloat16", 4)
H200 = environment.Environment("NVIDIA H200", "nvlink", "580", "13", "2.11", "3.6", "1", "abc")


def modelled(folder: Path, problem: Problem, *entries: tuple[Problem, dict[str, float]]) -> str:
    """The strategy chosen where the cost model knows the GPU and plans took, in the problems of the
    entries, so many times their prediction.
    """
    plans = {name: Plan(name) for name in ("sequential", "hopper", "fused", "pipelined")}
    for other, ratios in entries:
        times = {n: r * predict_us(other, plans[n], hardware.H200) for n, r in ratios.items()}
        measured = tuple(Measured(plans[name], us) for name, us in times.items())
        best = plans[min(times, key=times.__getitem__)]
        plan_cache.store(folder, Entry(other, H200, best, measured, (), 0, 0.0, 12, "today"))
    cache = plan_cache.PlanCache([folder], lambda strategy: H200)
    given = [*plans.values()], {*plans}
    return choice._unmeasured(problem, *given, cache, hardware.H200).strategy


@pytest.mark.parametrize("worse", ["hopper", "fused", "pipelined"])
def test_what_was_measured_of_another_shape_corrects_the_prediction(tmp_path, worse):
    """A plan that did badly there is not taken; else the prediction stands."""
    alone = modelled(tmp_path / "alone", LAYER)
    there = {"sequential": 1.0, "hopper": 1.0, "fused": 1.0, "pipelined": 1.0, worse: 3.0}
    other = replace(LAYER, M=4096, N=12288), there
    assert modelled(tmp_path, LAYER, other) != worse
    assert (modelled(tmp_path, LAYER, other) == alone) == (alone != worse)


def test_beside_others_what_was_measured_alone_corrects_the_careful(tmp_path):
    beside = replace(LAYER, beside=True)
    cheap = dict.fromkeys(("sequential", "hopper", "fused"), 1.0) | {"pipelined": 0.1}
    assert modelled(tmp_path / "alone", LAYER, (LAYER, cheap)) == "pipelined"
    chosen = modelled(tmp_path / "beside", beside, (LAYER, cheap | {"fused": 0.2}))
    assert chosen == "fused", "pipelined was not measured beside others"
    measured = (LAYER, cheap), (replace(beside, M=4096), cheap | {"sequential": 0.01})
    assert modelled(tmp_path / "both", beside, *measured) == "sequential"


def test_beside_others_few_rows_may_be_gathered_by_copy_engines(tmp_path):
    """Then one GEMM reads w once: that has been measured there, but it takes a model to choose."""
    few = Problem(Pattern.AG_GEMM, 256, 24576, 12288, "bfloat16", 2, beside=True)
    plans = [PLAIN, Plan("pipelined"), Plan("pipelined", splits=1), Plan("fused")]
    cache = plan_cache.PlanCache([tmp_path], lambda strategy: H200)
    given = few, plans, {plan.strategy for plan in plans}, cache
    assert choice._unmeasured(*given, hardware.H200) == plans[2]
    assert choice._unmeasured(*given, None) == plans[3]


def test_an_estimate_alone_is_careful():
    """No bands where kernels reach peers, no tiles of 192 columns, and no words of more than 64
    rows, unless somebody has measured them. Over more than two ranks and in a backward no one GEMM
    behind a gather and no rows in parts of K either; there and beside others no words in place of
    a gather or a reduce-scatter.
    """
    plans = [PLAIN, Plan("hopper"), Plan("signalled", group_rows=(2048,), comm_sms=8)]
    between_nodes = [PLAIN, plans[2]]

    def known(strategy: str) -> list[Entry]:
        measured = tuple(Measured(Plan(name), 1.0) for name in ("sequential", strategy))
        return [Entry(LAYER, H200, PLAIN, measured, (), 0, 0.0, 12, "today")]

    for entries in ([], known("hopper")):
        assert choice._safe(LAYER, plans, entries) == plans[:2]
        assert choice._safe(LAYER, between_nodes, entries) == between_nodes
    assert choice._safe(LAYER, plans, known("signalled")) == plans
    medium = Plan("hopper", tile=hopper_config.MEDIUM)
    assert choice._safe(LAYER, [*plans, medium], known("hopper")) == plans[:2]
    measured = replace(known("hopper")[0], measured=(Measured(medium, 1.0),))
    assert choice._safe(LAYER, [PLAIN, medium], [measured]) == [PLAIN, medium]
    scattered = replace(LAYER, pattern=Pattern.GEMM_RS, K=8 * 7 * 8 * 64, world_size=8)
    short = replace(scattered, K=scattered.K - 8 * 64)
    assert choice._safe(scattered, plans[:2], known("hopper")) == plans[:2]
    assert choice._safe(short, plans[:2], known("hopper")) == [PLAIN]
    tried = replace(known("hopper")[0], problem=short)
    assert choice._safe(short, plans[:2], [tried]) == plans[:2]
    few, divided = [PLAIN, Plan("low_latency")], replace(LAYER, M=64)
    assert choice._safe(divided, few, known("hopper")) == [PLAIN]
    assert choice._safe(divided, few, known("low_latency")) == few
    over_two = replace(divided, world_size=2)
    one = [PLAIN, Plan("pipelined", splits=1)]
    parts = [PLAIN, Plan("hopper", splits=4, tile=hopper_config.MEDIUM)]
    for kind in (few, one, parts):
        assert choice._safe(over_two, kind, known("hopper")) == kind
        for other in ({"world_size": 4}, {"layout": "nn"}, {"beside": True}):
            safe = choice._safe(replace(over_two, **other), kind, known("hopper"))
            assert safe == (kind if kind is not few and "beside" in other else [PLAIN])
    assert choice._safe(replace(over_two, M=128), few, known("hopper")) == [PLAIN]
    assert choice._safe(replace(LAYER, pattern=Pattern.GEMM_RS), one, known("hopper")) == one
    tried = replace(known("hopper")[0], measured=(Measured(parts[1], 1.0),))
    assert choice._safe(LAYER, parts, [tried]) == parts
    ragged = replace(LAYER, M=4 * 248)
    assert choice._safe(ragged, plans[:2], known("hopper")) == [PLAIN]
    assert choice._safe(replace(ragged, world_size=2), plans[:2], known("hopper")) == plans[:2]
    tried = replace(known("hopper")[0], problem=replace(LAYER, M=4 * 200))
    assert choice._safe(ragged, plans[:2], [tried]) == plans[:2]
    whole = replace(LAYER, pattern=Pattern.GEMM_AR, M=64)
    assert choice._safe(whole, few, known("hopper")) == few
    more = replace(whole, M=128)
    assert choice._safe(more, few, known("low_latency")) == few, "LAYER has more rows"
    tried = replace(known("low_latency")[0], problem=whole)
    assert choice._safe(more, few, [tried]) == [PLAIN]


def test_without_a_model_divided_rows_do_not_travel_as_words(tmp_path):
    plans = [PLAIN, Plan("low_latency"), Plan("fused")]
    cache = plan_cache.PlanCache([tmp_path], lambda strategy: H200)
    few, names = replace(LAYER, M=64, world_size=2), {plan.strategy for plan in plans}
    assert choice._nearest(few, plans, names, cache) == plans[2]
    assert choice._nearest(few, plans[:2], names, cache) == PLAIN
    whole = replace(few, pattern=Pattern.GEMM_AR)
    assert choice._nearest(whole, plans, names, cache) == plans[1]


def test_kernels_take_an_all_reduce_where_nccl_does_not_hide_it_behind_wgrad(tmp_path):
    """As in the rows of Llama-2 70B's qkv, dgrad and wgrad, over two ranks."""
    small = Problem(Pattern.GEMM_AR, 2048, 8192, 10240, "bfloat16", 2, "nn")
    assert modelled(tmp_path, small) == "sequential"
    assert modelled(tmp_path, replace(small, M=8192)) == "hopper"
    assert modelled(tmp_path, replace(small, layout="nt")) == "hopper"
    done = dict.fromkeys(("sequential", "fused", "pipelined"), 1.0) | {"hopper": 0.5}
    assert modelled(tmp_path, small, (replace(small, M=4096), done)) == "hopper"
