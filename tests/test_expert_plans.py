"""Measured plans of experts: what is measured, what counts as a hit, and that calls take it."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from races import FakeRace
from ranks import DEVICE, on_cpu_ranks, on_device
from test_expert_parallel import calls, even

import flux_megatron
from flux_megatron.expert_parallel import fused, plans, tune
from flux_megatron.expert_parallel.plans import ExpertEntry, ExpertProblem
from flux_megatron.problem import Plan
from flux_megatron.tune_command import experts as tune_experts
from flux_megatron.tuning import environment, plan_cache, tuner
from flux_megatron.tuning.plan_entry import Measured

CPU = torch.device("cpu")
PLAIN = Plan("sequential")
PROBLEM = ExpertProblem("a2a_gemm", 30, 3, 8, 16, "float32", 2, device="cpu")


def entry_of(problem: ExpertProblem, plan: Plan) -> ExpertEntry:
    measured = (Measured(plan, 1.0),)
    return ExpertEntry(problem, environment.of(CPU), plan, measured, (), 0, 0.0, 12, "today")


def keep(entry: ExpertEntry) -> Path:
    folder = flux_megatron.settings.get().cache
    plan_cache.keep(entry, folder, CPU)
    return plan_cache.store(plan_cache.user_folder(folder), entry)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLUX_MEGATRON_CACHE", str(tmp_path))
    flux_megatron.settings.reload()
    plan_cache.opened.cache_clear()
    yield tmp_path
    plan_cache.opened.cache_clear()
    monkeypatch.undo()
    flux_megatron.settings.reload()


def test_exactly_this_problem_and_environment_hit(cache):
    entry = entry_of(PROBLEM, Plan("signalled", bands=2))
    file = keep(entry)
    plan_cache.opened.cache_clear()
    assert plans.kept(PROBLEM, CPU) == entry
    others = {"operation": "gemm_a2a", "capacity": 31, "experts": 2, "N": 9, "K": 17}
    others |= {"dtype": "bfloat16", "world_size": 4, "layout": "nn", "device": "cuda"}
    assert {*others} == {field.name for field in fields(PROBLEM)}
    for name, value in others.items():
        assert plans.kept(replace(PROBLEM, **{name: value}), CPU) is None, name
    for name in environment.Environment.__dataclass_fields__:
        raw = json.loads(file.read_text())
        raw["entries"][0]["environment"][name] = "another"
        file.write_text(json.dumps(raw))
        plan_cache.opened.cache_clear()
        assert plans.kept(PROBLEM, CPU) is None, name
        keep(entry)


def chosen(rank: int, folder: Path, entries: list[ExpertEntry]) -> dict:
    """What calls run that name no strategy; only rank 0 has entries."""
    for entry in entries if rank == 0 else ():
        keep(entry)
    calls(rank, None, ("nt",), (even,))
    return flux_megatron.report().calls


@pytest.mark.skipif(DEVICE != "cpu", reason="entries are of interpreted kernels")
def test_calls_take_what_the_leader_has_kept(tmp_path):
    # of `calls` with `even` counts: 5 rows for each of 3 experts of 2 ranks, no spare ones
    first = ExpertProblem("a2a_gemm", 30, 3, 8, 16, "float32", 2, "nt", "cpu")
    second = replace(first, operation="gemm_a2a", N=16, K=8)
    problems = [first, second, replace(second, layout="nn"), replace(first, layout="nn")]
    tile = fused.default_plan(torch.empty(1, 16), 8).tile
    entries = [entry_of(one, Plan("signalled", tile=tile, bands=2)) for one in problems]
    entries[1] = entry_of(problems[1], PLAIN)
    environment = {"FLUX_MEGATRON_CACHE": str(tmp_path)}
    for counted in on_device(chosen, 2, tmp_path, entries, environment=environment):
        second = {("gemm_a2a", "sequential"): 1, ("gemm_a2a", "signalled"): 1}
        assert counted == {("a2a_gemm", "signalled"): 2} | second
    environment["FLUX_MEGATRON_STRATEGY"] = "fused"  # named by the user
    for counted in on_device(chosen, 2, tmp_path, entries, environment=environment):
        assert counted == {("a2a_gemm", "fused"): 2, ("gemm_a2a", "fused"): 2}


def measured(rank: int, problem: ExpertProblem, wrong: bool) -> tuple[ExpertEntry, list]:
    made = fused.gemm_a2a_kernels.gemm_a2a

    def spoiled(*given, **more):
        return made(*given, **more) + (wrong and rank == 1)

    with mock.patch.object(fused.gemm_a2a_kernels, "gemm_a2a", spoiled):
        trial = tune.Trial(problem, dist.group.WORLD, CPU)
        entry = tune.measure(problem, dist.group.WORLD, CPU, rounds=4)
    assert entry is not None
    return entry, trial._counts.tolist()


@pytest.mark.skipif(DEVICE != "cpu", reason="needs interpreted kernels")
@pytest.mark.parametrize("wrong", [False, True])
def test_all_strategies_are_measured_and_a_wrong_one_is_not(wrong):
    problem = replace(PROBLEM, operation="gemm_a2a", capacity=29, layout="nn")
    found = on_device(measured, 2, problem, wrong)
    (entry, counts), (other, theirs) = found
    assert entry == other
    tried = {one.plan.strategy for one in entry.measured}
    assert tried == {"sequential", "signalled"} | ({"fused"} if not wrong else set())
    assert len(entry.measured) == (4 if wrong else 5)  # three numbers of bands
    assert [one.plan.strategy for one in entry.failed] == ["fused"] * wrong
    assert all("rank 1: ArithmeticError: y differs" in one.reason for one in entry.failed)
    assert entry.plan in [one.plan for one in entry.measured]
    came = torch.tensor([counts, theirs]).sum((0, 2))
    assert came.tolist() == [14, 14], "half of the capacity at each rank"


def test_the_problems_of_a_layer():
    found = tune_experts.problems(4096, 14336, 8, 2, 8192, 2, "bfloat16", "cuda", gated=True)
    assert {one.capacity for one in found} == {8192 * 2 * 2}
    assert [(p.operation, p.layout, p.N, p.K) for p in found] == [
        ("a2a_gemm", "nt", 28672, 4096), ("gemm_a2a", "nt", 4096, 14336),
        ("gemm_a2a", "nn", 4096, 28672), ("a2a_gemm", "nn", 14336, 4096),
    ]  # fmt: skip


@on_cpu_ranks(2)
def test_the_host_of_experts_waits_and_does_not_count(rank):
    tuner.race = FakeRace(lambda name: 1.0)
    entry = tune.measure(PROBLEM, dist.group.WORLD, CPU)
    assert "signalled" in {one.plan.strategy for one in entry.measured}
    assert not any(tuner.race.with_host)
