"""Which plan a call gets: a measured one, or a race's winner, by its layer kind's table."""

import contextlib
import io
import os
import warnings
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import Case, check
from races import FakeRace
from ranks import DEVICE, on_device, on_device_ranks

from flux_megatron import errors, ops, settings
from flux_megatron.overlap.report import report
from flux_megatron.problem import Pattern, Plan, Problem
from flux_megatron.symm.agreement import Agreement
from flux_megatron.tuning import choice, environment, plan_cache, tuner
from flux_megatron.tuning.plan_entry import Entry, Measured

RULED = "fused" if DEVICE == "cpu" else "sequential"  # of few rows, unmeasured
SMALL, LARGER = Case("ag_gemm", 6, 5, 4), Case("ag_gemm", 64, 5, 4)
PLAIN = Plan("sequential")
CACHE = {"FLUX_MEGATRON_CACHE": "{tmp_path}"}
ON = CACHE | {"FLUX_MEGATRON_TUNE": "on"}


def store(folder: Path, M: int, strategy: str, beside: bool = False, **changes: str) -> None:
    """An entry for `SMALL`'s layer over two ranks, as if it had been measured here."""
    device = torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device("cpu")
    where = environment.of(device)
    problem = Problem(Pattern.AG_GEMM, M, 10, 4, "float32", 2, device=DEVICE, beside=beside)
    plan = Plan(strategy, comm_rows=3)
    measured = (Measured(plan, 0.0),)
    entry = Entry(problem, replace(where, **changes), plan, measured, (), 0, 0.0, 12, "today")
    plan_cache.store(plan_cache.user_folder(folder), entry)


OTHER, BESIDE = {"driver": "1.2.3"}, {"beside": True}
# FLUX_MEGATRON_BESIDE, entries of the cache, and what runs. One range of M is that of 64 and all
# below, the next that of 128.
STORED = {
    "hit": ("auto", [(12, "pipelined", {})], "pipelined"),
    "sequential": ("auto", [(12, "sequential", {})], "sequential"),
    "hit and neighbour": ("auto", [(12, "pipelined", {}), (18, "sequential", {})], "pipelined"),
    "its range": ("auto", [(18, "pipelined", {})], "pipelined"),
    "nearest": ("auto", [(6, "pipelined", {}), (14, "sequential", {})], "sequential"),
    "same software": ("auto", [(12, "pipelined", OTHER), (12, "sequential", {})], "sequential"),
    "other software": ("auto", [(12, "pipelined", OTHER)], "pipelined"),
    "other connections": ("auto", [(12, "pipelined", {"max_connections": "8"})], "pipelined"),
    "another range": ("auto", [(128, "pipelined", {})], RULED),
    "unknown strategy": ("auto", [(12, "magic", {})], RULED),
    "nothing": ("auto", [], RULED),
    "beside others": ("1", [(12, "pipelined", BESIDE), (12, "sequential", {})], "pipelined"),
    "beside alone": ("auto", [(12, "pipelined", BESIDE)], RULED),
    "never beside": ("0", [(12, "pipelined", BESIDE)], RULED),
}


@pytest.mark.parametrize(("beside", "entries", "expected"), STORED.values(), ids=STORED)
@on_device_ranks(2, environment=CACHE | {"FLUX_MEGATRON_BESIDE": "{beside}"})
def test_off(rank, tmp_path, entries, expected):
    if rank == 0:
        for M, strategy, changes in entries:
            store(tmp_path, M, strategy, **changes)
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what cannot be read
        check(SMALL)
    assert report().calls == {("ag_gemm", expected): 1}


@on_device_ranks(2, environment=CACHE)
def test_ranks_that_differ_in_the_setting_are_reported(rank):
    os.environ["FLUX_MEGATRON_BESIDE"] = str(rank)
    settings.reload()
    x, w = torch.ones(6, 4, device=DEVICE), torch.ones(5, 4, device=DEVICE)
    with pytest.raises(errors.ProblemMismatch, match=r"rank 1: ag_gemm .*, beside others"):
        ops.all_gather_gemm(x, w, dist.group.WORLD)


@on_device_ranks(2)
def test_only_the_leaders_cache_counts(rank, tmp_path):
    """Other ranks may not even see its files."""
    os.environ["FLUX_MEGATRON_CACHE"] = str(tmp_path / str(rank))
    settings.reload()
    store(tmp_path / str(rank), 12, ("pipelined", "sequential")[rank])
    check(SMALL)
    assert report().calls == {("ag_gemm", "pipelined"): 1}


def raced(rank: int, favourite: str) -> tuple[dict, int, str]:
    tuner.race = FakeRace(lambda name: 1.0 if name == favourite else 100.0)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        for case in (SMALL, SMALL, replace(SMALL, seed=1), SMALL):
            check(case)
    return report().calls, len(tuner.race.turns), said.getvalue()


def test_a_range_is_raced_once_said_and_kept(tmp_path):
    on = {name: value.format(tmp_path=tmp_path) for name, value in ON.items()}
    first = on_device(raced, 2, "pipelined", environment=on)
    for rank, (calls, races, said) in enumerate(first):
        assert calls == {("ag_gemm", "pipelined"): 4}
        assert races > 1
        line = "flux_megatron: measured ag_gemm M=64 N=10 K=4 nt float32 over 2 ranks on"
        assert said.count(line) == (rank == 0)
        assert rank or "pipelined 1 us, sequential 100 us" in said
    (file,) = tmp_path.rglob("*.json")
    # a later run finds it, whatever it would measure itself
    for mode in ("on", "off"):
        later = on | {"FLUX_MEGATRON_TUNE": mode}
        found = on_device(raced, 2, "fused", environment=later)
        assert found == [({("ag_gemm", "pipelined"): 4}, 0, "")] * 2
    # what was measured with other software is measured again
    file.write_text(file.read_text().replace('"torch": "', '"torch": "0.'))
    for calls, races, _ in on_device(raced, 2, "fused", environment=on):
        assert calls == {("ag_gemm", "fused"): 4}
        assert races > 1
    assert '"torch": "0.' not in file.read_text()


def test_a_race_is_under_the_conditions_of_the_run(tmp_path):
    on = {"FLUX_MEGATRON_BESIDE": "1"}
    on |= {name: value.format(tmp_path=tmp_path) for name, value in ON.items()}
    for calls, races, _ in on_device(raced, 2, "fused", environment=on):
        assert calls == {("ag_gemm", "fused"): 4}
        assert races > 1
    (file,) = tmp_path.rglob("*.json")
    assert '"beside": true' in file.read_text()
    off = on | {"FLUX_MEGATRON_TUNE": "off"}
    assert on_device(raced, 2, "", environment=off) == [({("ag_gemm", "fused"): 4}, 0, "")] * 2


@pytest.mark.parametrize(("takes_s", "raced_ranges"), [(0.3, 2), (0.5, 1)])
@on_device_ranks(2, environment=ON | {"FLUX_MEGATRON_TUNE_SECONDS": "0.4"})
def test_no_range_is_raced_when_the_time_for_races_is_over(rank, tmp_path, takes_s, raced_ranges):
    """Every plan's first run, which compiles, takes as long again, and does not count."""
    fake = FakeRace(lambda name: 1.0 if name == "pipelined" else 100.0, takes_s=takes_s)
    tuner.race = choice.time = fake
    for case in (SMALL, LARGER):
        check(case)
    assert len(tuner.race.turns) > 2
    expected = {("ag_gemm", "pipelined"): raced_ranges, ("ag_gemm", RULED): 2 - raced_ranges}
    assert report().calls == {call: count for call, count in expected.items() if count}
    dist.barrier()
    assert len([*tmp_path.rglob("*.json")]) == raced_ranges


@on_device_ranks(2, environment=ON)
def test_a_new_m_asks_nobody(rank):
    questions: list[str] = []
    ask = Agreement.ask
    tuner.race = FakeRace(lambda name: 1.0 if name == "pipelined" else 100.0)
    with mock.patch.object(
        Agreement, "ask", lambda self, *given: (questions.append(given[0]), ask(self, *given))[1]
    ):
        for rows in range(1, 40):
            check(replace(SMALL, M_shard=rows))
    asked = [text for text in questions if "grows" not in text]
    assert [text.partition(" ")[0] for text in asked] == ["ag_gemm", "race", "kernels"]
    assert len(report().calls) == 1


@on_device_ranks(2, environment=ON)
def test_nothing_is_measured_while_a_rank_captures(rank):
    tuner.race = FakeRace(lambda name: 1.0)
    choice.capturing = lambda device: rank == 1
    check(SMALL)
    assert (report().calls, len(tuner.race.turns)) == ({("ag_gemm", RULED): 1}, 0)


@on_device_ranks(2, environment=ON | {"FLUX_MEGATRON_TIMEOUT_S": "5"})
def test_ranks_that_disagree_are_reported_before_a_race(rank):
    """One brings another shape, then a plan where the other has none; then all is well."""
    group = dist.group.WORLD
    x, w = torch.ones(6, 4 + rank, device=DEVICE), torch.ones(5, 4 + rank, device=DEVICE)
    with pytest.raises(errors.ProblemMismatch, match="rank 1: ag_gemm M=12 N=10 K=5"):
        ops.all_gather_gemm(x, w, group)
    x, w = torch.ones(6, 4, device=DEVICE), torch.ones(5, 4, device=DEVICE)
    with pytest.raises(errors.ProblemMismatch, match=r"rank 1: ag_gemm M=12 N=10 K=4 .* with {"):
        ops.all_gather_gemm(x, w, group, plan=PLAIN if rank else None)
    check(LARGER)


@on_device_ranks(2, environment=ON)
def test_a_cache_that_cannot_be_written_costs_a_warning(rank, tmp_path):
    (tmp_path / "plans").touch()  # not a folder
    dist.barrier()
    tuner.race = FakeRace(lambda name: 1.0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        check(SMALL)
    said = [str(one.message) for one in said if "flux_megatron" in str(one.message)]
    assert len(said) == (rank == 0)
    assert all("a measured plan is not kept:" in text for text in said)


@on_device_ranks(2, environment=ON)
def test_measuring_leaves_the_run_alone(rank):
    torch.manual_seed(5)
    before = torch.rand(1, device=DEVICE)
    torch.manual_seed(5)
    check(SMALL)  # operands of a generator of their own
    held = report().workspace_bytes
    for seed in range(3):
        check(replace(SMALL, seed=seed))
    assert torch.equal(before, torch.rand(1, device=DEVICE))
    assert report().workspace_bytes == held
