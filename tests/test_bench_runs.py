"""Bench runs on the CPU: verification, rows, the command."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from bench_run import rows_of, run_here
from races import agreed
from ranks import DEVICE, on_cpu_ranks, run_ranks
from started import python

from flux_megatron import report, reset_report
from flux_megatron.lab.bench import provenance, records, runner, suites
from flux_megatron.lab.bench.backward import Backward
from flux_megatron.lab.bench.candidates import Candidate
from flux_megatron.lab.bench.competitors import transformer_engine
from flux_megatron.lab.bench.competitors.transformer_engine import TransformerEngine
from flux_megatron.lab.bench.forward import Forward
from flux_megatron.lab.bench.options import Options
from flux_megatron.lab.bench.verify import examine

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
# with a GPU the kernels are compiled in this process, and do not take tensors of the CPU
interpreted = pytest.mark.skipif(DEVICE != "cpu", reason="needs interpreted kernels")


def tiny(pattern, op):
    found = suites.cases("llama2-70b", pattern, (32,), 2, scale=512)
    (case,) = (c for c in found if c.op == op)
    return case


@interpreted
@pytest.mark.parametrize(
    ("pattern", "op"),
    [("ag_gemm", "fc2 dgrad"), ("gemm_rs", "proj"), ("backward", "qkv"), ("backward", "fc2"),
     ("backward_ar", "qkv")],
)  # fmt: skip
@on_cpu_ranks(2)
def test_only_right_results_are_timed(rank, pattern, op):
    kind = runner.KINDS.get(pattern, Forward)
    experiment = kind(tiny(pattern, op), dist.group.WORLD, CPU, torch.float32)
    given = {candidate.name: candidate for candidate in experiment.candidates()}
    serial = given["serial"].call

    def but(change):
        def call():
            results = tuple(result.clone() for result in serial())
            change(results[0])
            return results

        return call

    def fails_here():
        results = serial()  # a collective, in which every rank takes part
        if rank == 1:
            raise ValueError("not on this rank")
        return results

    bad = {
        "not a number": but(lambda y: y[0, 0].fill_(torch.nan)),
        "a stale row": but(lambda y: y[1].copy_(y[0])),
        "wrong on rank 1": but(lambda y: y.mul_(2 if rank == 1 else 1)),
        "a bit off": but(lambda y: y.mul_(1 + 1e-5)),
        "wrong shape": lambda: tuple(result[1:] for result in serial()),
        "fails on rank 1": fails_here,
    }
    candidates = [*given.values(), *(Candidate(name, "peer", call) for name, call in bad.items())]
    found = agreed(examine(experiment, candidates, dist.group.WORLD))
    right = {name for name, verdict in found.items() if verdict.right}
    theirs = {"megatron"} if pattern in suites.BACKWARDS else set()
    assert right == theirs | {
        "gemm", "serial", "serial_again", "fused", "pipelined", "signalled", "sequential", "auto",
        "low_latency",
    }  # fmt: skip
    assert found["fails on rank 1"].failure == "rank 1: ValueError: not on this rank"
    assert "expected" in found["wrong shape"].failure
    assert found["not a number"].errors[0] == float("inf")


@interpreted
@on_cpu_ranks(2)
def test_a_strategy_of_backward_is_the_one_that_runs(rank):
    experiment = Backward(tiny("backward", "qkv"), dist.group.WORLD, CPU, torch.float32)
    candidates = {candidate.name: candidate for candidate in experiment.candidates()}
    for name in ("fused", "pipelined", "sequential"):
        reset_report()
        candidates[name].call()
        assert {strategy for _, strategy in report().calls} == {name}


def _run(rank, options, seconds=math.inf):
    """What is printed."""
    run = replace(run_here(Path(options.out), options.scale), end_s=time.monotonic() + seconds)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runner.measure_all(options, run)
    return printed.getvalue()


def case_of(row):
    return row.suite, row.pattern, row.op, row.M


def options(file, **changed):
    given = Options(
        suites=("llama2-70b",), patterns=suites.PATTERNS, Ms=(32,), out=str(file), rounds=2, tp=2,
        device="cpu", scale=512,
    )  # fmt: skip
    return replace(given, **changed)


def by_case(rows):
    """Rows of each case by their candidates."""
    cases = {}
    for row in rows:
        cases.setdefault(case_of(row), {})[row.candidate] = row
    return cases


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Rows of a tiny run of everything."""
    file = tmp_path_factory.mktemp("bench") / "rows.jsonl"
    shown, silent = run_ranks(_run, 2, options(file))
    cases = options(file).cases()
    assert [shown.index(f"{n} of {len(cases)}: {case}: gemm ") for n, case in enumerate(cases, 1)]
    assert not silent
    return file


@interpreted
def test_every_candidate_of_every_case_has_a_row(measured):
    found = by_case(rows_of(measured))
    assert [*found] == [case_of(case) for case in options("").cases()]
    for (_, pattern, _, _), group in found.items():
        expected = {"gemm", "serial", "serial_again", "auto", "sequential"}
        expected |= {n for of in suites.PEERS.values() for n in of.get(pattern, ())}
        assert expected <= group.keys()
        for row in group.values():
            assert row.status in (records.OK, records.MISSING, records.UNSUPPORTED), row
            assert (row.status == records.OK) == (row.median_us is not None) == bool(row.times_us)
            assert row.reason or row.status == records.OK


@interpreted
def test_rows_tell_where_they_come_from(measured):
    rows = rows_of(measured)
    assert len({row.run for row in rows}) == 1
    where = rows[0]
    assert (where.world_size, where.dtype, where.scale, where.gpu) == (2, "float32", 512, "cpu")
    assert (where.torch, where.nvls) == (torch.__version__, "off")
    plans = [row.plan for row in rows if row.candidate == "fused" and row.pattern == "gemm_rs"]
    assert {plan["strategy"] for plan in plans} == {"fused"}
    text = measured.read_text()
    for absent in (os.uname().nodename, str(Path.cwd()), "NaN"):
        assert absent not in text


@pytest.fixture
def rows(tmp_path):
    """Rows of a run with other options, and what it has shown."""

    def run(**changed):
        file = tmp_path / "rows.jsonl"
        shown, _ = run_ranks(_run, 2, options(file, **changed))
        return rows_of(file), shown

    return run


@interpreted
def test_chosen_candidates_and_their_baselines(rows):
    found, _ = rows(patterns=("ag_gemm",), candidates=("pipelined",))
    names = {row.candidate for row in found}
    assert names == {"gemm", "ours_gemm", "serial", "serial_again", "pipelined"}


@interpreted
def test_every_plan_of_a_shape(rows):
    patterns = ("ag_gemm", "gemm_rs", "gemm_ar")
    shapes = tuple(f"{pattern} 4x6x8" for pattern in patterns)
    found, _ = rows(shapes=shapes, all_plans=True, candidates=("auto",))
    cases = [(row.pattern, row.M, row.N_local, row.K_local) for row in found]
    assert [*dict.fromkeys(cases)] == [(pattern, 4, 6, 8) for pattern in patterns]
    for pattern in patterns:
        plans = [row for row in found if row.pattern == pattern and " " in row.candidate]
        assert {row.plan["strategy"] for row in plans} >= {"fused", "low_latency"}
        assert all(row.status == records.OK and row.efficiency is not None for row in plans)


@interpreted
def test_a_case_beside_others_too(rows, tmp_path, monkeypatch):
    monkeypatch.setenv("FLUX_MEGATRON_CACHE", str(tmp_path))
    asked = {"patterns": ("ag_gemm",), "candidates": ("auto", "pipelined"), "beside": True}
    asked["loads"] = ("reduce_scatter",)
    found, shown = rows(**asked)
    heads = [line.partition(": gemm ")[0] for line in shown.splitlines() if " of 4: " in line]
    cases = [
        f"{number} of 4: {case}" for number, case in enumerate(options("", **asked).cases(), 1)
    ]
    assert heads == [case + beside for case in cases for beside in ("", ", beside reduce_scatter")]
    alone, beside = (by_case(row for row in found if row.beside == is_) for is_ in (False, True))
    assert [*alone] == [*beside]
    assert len(found) == sum(len(group) for group in [*alone.values(), *beside.values()])
    for group, with_others in zip(alone.values(), beside.values(), strict=True):
        assert [*group] == [*with_others]
        assert group["serial"].serial_us != with_others["serial"].serial_us
        assert all(row.status == records.OK for row in with_others.values() if row.times_us)
        auto = with_others["auto"]
        exposed = auto.serial_us - auto.gemm_us  # on a busy machine perhaps none
        expected = 1 - (auto.median_us - auto.gemm_us) / exposed if exposed > 0 else None
        assert auto.efficiency == pytest.approx(expected, abs=0.01)
        # nothing was measured: the first strategy, which may run beside others too
        assert group["auto"].plan["strategy"] == auto.plan["strategy"] == "fused"


@interpreted
def test_no_case_is_started_when_the_time_is_up(tmp_path):
    file = tmp_path / "rows.jsonl"
    assert run_ranks(_run, 2, options(file), -1) == ["", ""]
    assert not file.exists()


def test_the_command_starts_its_ranks(tmp_path):
    words = "bench --device cpu --scale 512 --tp 2 --M 32 --rounds 2 --pattern gemm_rs"
    words += " --suite llama2-70b --candidates sequential,auto --out"
    assert "auto" in python("-m", "flux_megatron.cli", *words.split(), tmp_path).stdout
    assert len(rows_of(tmp_path / "rows.jsonl")) == 4 * 6


def test_multicast_has_to_be_forbidden_to_every_library(monkeypatch):
    for name, value in provenance.WITHOUT_MULTICAST.items():
        monkeypatch.setenv(name, value)
    provenance.refuse_multicast()
    for name, value in provenance.WITHOUT_MULTICAST.items():
        monkeypatch.setenv(name, "1" if value == "0" else "0")
        with pytest.raises(ValueError, match=name):
            provenance.refuse_multicast()
        monkeypatch.setenv(name, value)


def test_userbuffers_refuse_to_make_multicast_objects(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "not installed" in TransformerEngine().unavailable()
    monkeypatch.setattr(transformer_engine.util, "find_spec", lambda name: object())
    monkeypatch.setattr(transformer_engine, "import_module", lambda name: object())
    monkeypatch.delenv("UB_SKIPMC", raising=False)
    assert "UB_SKIPMC=1 expected" in TransformerEngine().unavailable()
    monkeypatch.setenv("UB_SKIPMC", "1")
    assert TransformerEngine().unavailable() is None


def test_a_row_says_when_any_source_of_the_package_differs_from_its_commit(tmp_path, monkeypatch):
    package = tmp_path / "flux_megatron"
    file = package / Path(provenance.__file__).relative_to(ROOT / "flux_megatron")
    file.parent.mkdir(parents=True)
    for path in (file, package / "ops.py", tmp_path / "README.md"):
        path.touch()
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(provenance, "__file__", str(file))

    def commit() -> str:
        return provenance.describe(CPU, 2, torch.float32, 1, False, "").commit

    (tmp_path / "README.md").write_text("no source")
    assert len(commit()) == 12
    (package / "ops.py").write_text("1")
    assert commit().endswith("+dirty")
