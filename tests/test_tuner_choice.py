"""Which plan a call gets: a measured one, a neighbour's, the model's; lazily measured in bounds."""

from __future__ import annotations

import contextlib
import io
import os
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import Case, check
from races import FakeRace
from ranks import DEVICE, on_device

from flux_megatron import errors, ops, settings
from flux_megatron.kernels import hopper_config
from flux_megatron.overlap.report import report
from flux_megatron.perf import hardware
from flux_megatron.perf.operator_cost import predict_us
from flux_megatron.problem import Pattern, Plan, Problem
from flux_megatron.tuning import choice, environment, plan_cache, tuner
from flux_megatron.tuning.plan_entry import Entry, Measured

SMALL, LARGER = Case("ag_gemm", 6, 5, 4), Case("ag_gemm", 9, 5, 4)
PLAIN = Plan("sequential")


def store(
    folder: Path, M: int, strategy: str, beside: bool = False, others: str = "", **changes: str
) -> None:
    """An entry for `SMALL`'s layer over two ranks, as if it had been measured here: `strategy` was
    the fastest, then `others`.
    """
    device = torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device("cpu")
    where = environment.of(device, strategy)
    problem = Problem(Pattern.AG_GEMM, M, 10, 4, "float32", 2, device=DEVICE, beside=beside)
    plans = [Plan(name, comm_rows=3) for name in (strategy, *others.split())]
    measured = tuple(Measured(plan, float(place)) for place, plan in enumerate(plans))
    entry = Entry(problem, replace(where, **changes), plans[0], measured, (), 0, 0.0, 12, "today")
    plan_cache.store(choice.user_folder(folder), entry)


def without_facts() -> None:
    """The cost model knows nothing of this machine, as of a CPU: all strategies may win."""
    hardware.find = lambda gpu, link: None


def ran(rank: int, folder: Path, entries: list[tuple], case: Case) -> dict:
    without_facts()
    if rank == 0:
        for M, strategy, changes in entries:
            store(folder, M, strategy, **changes)
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what cannot be read
        check(case)
    return report().calls


OTHER = {"driver": "1.2.3"}


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([(12, "pipelined", {})], "pipelined"),
        ([(12, "sequential", {})], "sequential"),
        ([(12, "pipelined", {}), (18, "sequential", {})], "pipelined"),
        ([(18, "pipelined", {})], "pipelined"),
        ([(6, "pipelined", {}), (14, "sequential", {})], "sequential"),
        ([(14, "pipelined", OTHER), (18, "sequential", {})], "sequential"),
        ([(12, "pipelined", OTHER), (18, "sequential", {})], "pipelined"),
        ([(12, "pipelined", OTHER)], "pipelined"),
        ([(12, "pipelined", {"max_connections": "8"})], "pipelined"),
        ([(48, "pipelined", {})], "fused"),
        ([(12, "magic", {})], "fused"),
        ([], "fused"),
    ],
    ids=[
        "hit", "sequential", "hit and neighbour", "neighbour", "nearest", "same software", "same M",
        "other software", "other connections", "too far", "unknown strategy", "nothing",
    ],
)  # fmt: skip
def test_off(tmp_path, entries, expected):
    environment = {"FLUX_MEGATRON_CACHE": str(tmp_path)}
    for calls in on_device(ran, 2, tmp_path, entries, SMALL, environment=environment):
        assert calls == {("ag_gemm", expected): 1}


BESIDE = {"beside": True}


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([(12, "fused", BESIDE), (12, "pipelined", {})], "fused"),
        ([(18, "fused", BESIDE), (12, "pipelined", {})], "fused"),
        ([(12, "fused", BESIDE | OTHER), (12, "sequential", {})], "fused"),
        ([(12, "sequential", {"others": "pipelined"})], "sequential"),
        ([(12, "pipelined", {"others": "sequential fused"})], "sequential"),
        ([(18, "pipelined", {"others": "fused sequential"})], "fused"),
        ([(12, "pipelined", {})], "fused"),
        ([(48, "pipelined", BESIDE)], "fused"),
        ([], "fused"),
    ],
    ids=[
        "hit", "neighbour", "other software", "alone", "alone, of the careful", "alone, neighbour",
        "alone, none careful", "too far", "nothing",
    ],
)  # fmt: skip
def test_beside_others_only_what_was_measured_there_or_is_careful(tmp_path, entries, expected):
    environment = {"FLUX_MEGATRON_CACHE": str(tmp_path), "FLUX_MEGATRON_BESIDE": "1"}
    for calls in on_device(ran, 2, tmp_path, entries, SMALL, environment=environment):
        assert calls == {("ag_gemm", expected): 1}


@pytest.mark.parametrize("setting", ["auto", "0"])
def test_alone_nothing_is_taken_from_beside(tmp_path, setting):
    environment = {"FLUX_MEGATRON_CACHE": str(tmp_path), "FLUX_MEGATRON_BESIDE": setting}
    entries = [(12, "pipelined", BESIDE)]
    for calls in on_device(ran, 2, tmp_path, entries, SMALL, environment=environment):
        assert calls == {("ag_gemm", "fused"): 1}


def one_is_beside(rank: int) -> None:
    os.environ["FLUX_MEGATRON_BESIDE"] = str(rank)
    settings.reload()
    x, w = torch.ones(6, 4, device=DEVICE), torch.ones(5, 4, device=DEVICE)
    with pytest.raises(errors.ProblemMismatch, match=r"rank 1: ag_gemm .*, beside others"):
        ops.all_gather_gemm(x, w, dist.group.WORLD)


def test_ranks_that_differ_in_the_setting_are_reported(tmp_path):
    on_device(one_is_beside, 2, environment={"FLUX_MEGATRON_CACHE": str(tmp_path)})


def caches_differ(rank: int, folder: Path) -> dict:
    os.environ["FLUX_MEGATRON_CACHE"] = str(folder / str(rank))
    settings.reload()
    store(folder / str(rank), 12, ("pipelined", "sequential")[rank])
    check(SMALL)
    return report().calls


def test_only_the_leaders_cache_counts(tmp_path):
    """Other ranks may not even see its files."""
    for calls in on_device(caches_differ, 2, tmp_path):
        assert calls == {("ag_gemm", "pipelined"): 1}


def lazily(rank: int, folder: Path, favourite: str) -> tuple[dict, int, str]:
    without_facts()
    tuner.race = FakeRace(lambda name: 1.0 if name == favourite else 100.0)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        for case in (SMALL, SMALL, replace(SMALL, seed=1), SMALL):
            check(case)
    return report().calls, len(tuner.race.turns), said.getvalue()


def test_lazy_measures_once_says_so_and_keeps_it(tmp_path):
    lazy = {"FLUX_MEGATRON_CACHE": str(tmp_path), "FLUX_MEGATRON_TUNE": "lazy"}
    first = on_device(lazily, 2, tmp_path, "pipelined", environment=lazy)
    for rank, (calls, races, said) in enumerate(first):
        assert calls == {("ag_gemm", "pipelined"): 4}
        assert races > 1
        line = "flux_megatron: measured ag_gemm M=12 N=10 K=4 nt float32 over 2 ranks on"
        assert said.count(line) == (1 if rank == 0 else 0)
        if rank == 0:
            assert "pipelined 1 us, sequential 100 us" in said
    (file,) = tmp_path.rglob("*.json")
    # a later run finds it, whatever it would measure itself
    for mode in ("lazy", "off"):
        later = lazy | {"FLUX_MEGATRON_TUNE": mode}
        for calls, races, said in on_device(lazily, 2, tmp_path, "fused", environment=later):
            assert (calls, races, said) == ({("ag_gemm", "pipelined"): 4}, 0, "")
    # what was measured with other software is measured again
    file.write_text(file.read_text().replace('"torch": "', '"torch": "0.'))
    for calls, races, _ in on_device(lazily, 2, tmp_path, "fused", environment=lazy):
        assert calls == {("ag_gemm", "fused"): 4}
        assert races > 1
    assert '"torch": "0.' not in file.read_text()


def test_lazy_measures_under_the_conditions_of_the_run(tmp_path):
    lazy = {
        "FLUX_MEGATRON_CACHE": str(tmp_path),
        "FLUX_MEGATRON_TUNE": "lazy",
        "FLUX_MEGATRON_BESIDE": "1",
    }
    for calls, races, _ in on_device(lazily, 2, tmp_path, "fused", environment=lazy):
        assert calls == {("ag_gemm", "fused"): 4}
        assert races > 1
    (file,) = tmp_path.rglob("*.json")
    assert '"beside": true' in file.read_text()
    off = lazy | {"FLUX_MEGATRON_TUNE": "off"}
    for calls, races, _ in on_device(lazily, 2, tmp_path, "", environment=off):
        assert (calls, races) == ({("ag_gemm", "fused"): 4}, 0)


def slowly(rank: int) -> tuple[dict, int]:
    without_facts()
    fake = FakeRace(lambda name: 1.0 if name == "pipelined" else 100.0, takes_s=0.3)
    tuner.race = tuner.time = choice.time = fake
    for case in (SMALL, LARGER):
        check(case)
    return report().calls, len(tuner.race.turns)


def test_lazy_stops_when_its_time_is_over_and_keeps_nothing_half_done(tmp_path):
    bounded = {
        "FLUX_MEGATRON_CACHE": str(tmp_path),
        "FLUX_MEGATRON_TUNE": "lazy",
        "FLUX_MEGATRON_TUNE_SECONDS": "0.4",
    }
    for calls, races in on_device(slowly, 2, environment=bounded):
        # sequential, fused, then both together; the second problem finds no time left
        assert races == 3
        assert calls == {("ag_gemm", "sequential"): 1, ("ag_gemm", "fused"): 1}
    assert [*tmp_path.rglob("*.json")] == []


def captured(rank: int) -> tuple[dict, int]:
    without_facts()
    tuner.race = FakeRace(lambda name: 1.0)
    choice.capturing = lambda device: rank == 1
    check(SMALL)
    return report().calls, len(tuner.race.turns)


def test_nothing_is_measured_while_a_rank_captures(tmp_path):
    lazy = {"FLUX_MEGATRON_CACHE": str(tmp_path), "FLUX_MEGATRON_TUNE": "lazy"}
    for answer in on_device(captured, 2, environment=lazy):
        assert answer == ({("ag_gemm", "fused"): 1}, 0)


def ranks_disagree(rank: int) -> float:
    """One brings another shape, then a plan where the other has none; then all is well."""
    group, started = dist.group.WORLD, time.monotonic()
    x, w = torch.ones(6, 4 + rank, device=DEVICE), torch.ones(5, 4 + rank, device=DEVICE)
    with pytest.raises(errors.ProblemMismatch, match="rank 1: ag_gemm M=12 N=10 K=5"):
        ops.all_gather_gemm(x, w, group)
    x, w = torch.ones(6, 4, device=DEVICE), torch.ones(5, 4, device=DEVICE)
    with pytest.raises(errors.ProblemMismatch, match=r"rank 1: ag_gemm M=12 N=10 K=4 .* with {"):
        ops.all_gather_gemm(x, w, group, plan=PLAIN if rank else None)
    check(LARGER)
    return time.monotonic() - started


def test_ranks_that_disagree_are_reported_before_anything_is_measured(tmp_path):
    lazy = {"FLUX_MEGATRON_CACHE": str(tmp_path), "FLUX_MEGATRON_TUNE": "lazy"}
    on_device(ranks_disagree, 2, environment=lazy | {"FLUX_MEGATRON_TIMEOUT_S": "5"})


def no_place_for_the_cache(rank: int) -> list[str]:
    tuner.race = FakeRace(lambda name: 1.0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        check(SMALL)
    return [str(one.message) for one in said if "flux_megatron" in str(one.message)]


def test_a_cache_that_cannot_be_written_costs_a_warning(tmp_path):
    (tmp_path / "plans").write_text("not a folder")
    lazy = {"FLUX_MEGATRON_CACHE": str(tmp_path), "FLUX_MEGATRON_TUNE": "lazy"}
    first, second = on_device(no_place_for_the_cache, 2, environment=lazy)
    assert len(first) == 1
    assert first[0].startswith("flux_megatron: a measured plan is not kept:")
    assert second == []


def caller_state(rank: int) -> bool:
    """Measuring draws no numbers from the run's generator and leaves its workspace alone."""
    torch.manual_seed(5)
    before = torch.rand(1, device=DEVICE)
    torch.manual_seed(5)
    check(SMALL)  # operands of a generator of their own
    held = report().workspace_bytes
    for seed in range(3):
        check(replace(SMALL, seed=seed))
    return torch.equal(before, torch.rand(1, device=DEVICE)) and report().workspace_bytes == held


def test_measuring_leaves_the_run_alone(tmp_path):
    lazy = {"FLUX_MEGATRON_CACHE": str(tmp_path), "FLUX_MEGATRON_TUNE": "lazy"}
    assert on_device(caller_state, 2, environment=lazy) == [True, True]


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
    behind a gather either; there and beside others no rows in parts of K, and no words in place of
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
            assert safe == (one if kind is one and "beside" in other else [PLAIN])
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
