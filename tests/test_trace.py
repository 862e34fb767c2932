"""Phases, recorded waits, and `flux-megatron trace`: its timelines and its files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import DEVICE, run_ranks
from torch.profiler import ProfilerActivity, profile
from typer.testing import CliRunner

from flux_megatron import ops, settings
from flux_megatron.bench.trace import merge, timeline
from flux_megatron.bench.trace.merge import RankTrace
from flux_megatron.bench.trace.timeline import (
    COMMUNICATION,
    COMPUTE,
    PASS,
    WAIT,
    KernelWait,
    KernelWaits,
    Span,
    Timeline,
)
from flux_megatron.cli import app
from flux_megatron.nn.functions import column_parallel_linear, row_parallel_linear
from flux_megatron.overlap import phase as phases
from flux_megatron.overlap import wait_log

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="bodies are for interpreted ranks")
ROOT = Path(__file__).parents[1]
LATE_S = 0.3


def _names_of(rank, strategy):
    """The phases of both layers, forward and backward."""
    os.environ["FLUX_MEGATRON_STRATEGY"] = strategy
    settings.reload()
    group = dist.group.WORLD
    x, w, h = torch.randn(8, 32), torch.randn(16, 32), torch.randn(16, 16)
    for tensor in (x, w, h):
        tensor.requires_grad_()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        column_parallel_linear(x, w, None, group=group).sum().backward()
        row_parallel_linear(h, w.t().contiguous(), group=group).sum().backward()
    found = {event.name for event in profiler.events()}
    return {n.removeprefix(phases.PREFIX) for n in found if n.startswith(phases.PREFIX)}


PASSES = {"fprop", "dgrad", "wgrad"}
MOVED = {"gather push", "local shard", "wait", "reduce"}
NAMES = {
    "fused": PASSES | MOVED | {"ag_gemm kernel", "gemm_rs kernel"},
    "pipelined": PASSES | MOVED | {"gemm chunk", "scatter push"},
    "sequential": PASSES | {"gemm chunk", "wait", "all-gather", "reduce-scatter"},
}


@pytest.mark.parametrize("strategy", NAMES)
def test_every_phase_has_a_name_that_is_documented(strategy):
    assert run_ranks(_names_of, 2, strategy) == [NAMES[strategy]] * 2
    for name in NAMES[strategy]:
        assert re.search(rf"\b{name}\b", phases.__doc__), name


def test_unseen_phases_are_one_object():
    assert ops.phase("wait") is ops.phase("reduce")


def test_nvtx_ranges_are_for_the_asking(monkeypatch):
    seen = []

    @contextmanager
    def named(name):
        seen.append(name)
        yield

    monkeypatch.setattr(torch.cuda.nvtx, "range", named)
    monkeypatch.setenv("FLUX_MEGATRON_NVTX", "1")
    settings.reload()
    with ops.phase("wait"):
        pass
    monkeypatch.undo()
    settings.reload()
    with ops.phase("reduce"):
        pass
    assert seen == ["flux_megatron: wait"]


def _recorded(rank, record):
    os.environ |= {"FLUX_MEGATRON_STRATEGY": "fused", "FLUX_MEGATRON_RECORD_WAITS": record}
    settings.reload()
    x, w = torch.ones(8, 16), torch.ones(16, 16)
    for late in (0.0, LATE_S):  # the first call meets the other ranks
        dist.barrier()
        wait_log.clear(x.device)
        time.sleep(late * rank)
        y = ops.all_gather_gemm(x, w, dist.group.WORLD)
    assert bool((y == 16).all())
    return wait_log.recorded(x.device)


def test_a_late_rank_is_seen_in_the_waits_of_the_other():
    (launch,), (of_late,) = run_ranks(_recorded, 2, "1")
    assert (launch.kernel, launch.lost) == ("ag_gemm", 0)
    assert {wait.source for wait in launch.waits} == {1}
    assert {wait.cta for wait in launch.waits} == {0}
    waited_s = sum(wait.end_ns - wait.begin_ns for wait in launch.waits) * 1e-9
    assert 0.2 * LATE_S < waited_s < 20 * LATE_S
    assert {wait.source for wait in of_late.waits} == {0}
    assert waited_s > 2e-9 * sum(wait.end_ns - wait.begin_ns for wait in of_late.waits)


def test_nothing_is_recorded_unless_asked_for():
    assert run_ranks(_recorded, 2, "0") == [[], []]


def test_the_log_keeps_the_last_launches(monkeypatch):
    monkeypatch.setenv("FLUX_MEGATRON_RECORD_WAITS", "1")
    settings.reload()
    device = torch.device("cpu")
    wait_log.clear(device)
    for number in range(wait_log.LAUNCHES + 2):
        buffer = wait_log.next_buffer(f"kernel {number}", device)
        assert int(buffer[0, 0]) == 0
        buffer[0, 0] = 1
        buffer[1] = torch.tensor([3, 2, 1, 100, 200 + number])
    launches = wait_log.recorded(device)
    wait_log.clear(device)
    monkeypatch.undo()
    settings.reload()
    assert [one.kernel for one in launches] == [f"kernel {n}" for n in range(2, 18)]
    assert launches[-1].waits == [(3, 2, 1, 100, 217)]


def test_more_waits_than_a_buffer_holds_are_counted():
    from flux_megatron.kernels import wait_records

    (buffer,) = wait_records.empty_buffers(1, torch.device("cpu"))
    buffer[0, 0] = len(buffer) + 6
    waits, lost = wait_records.read(buffer)
    assert (len(waits), lost) == (len(buffer) - 1, 7)


def gpu_event(name, begin_us, time_us, stream=7, cat="kernel"):
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": begin_us,
            "dur": time_us, "args": {"stream": stream}}  # fmt: skip


GPU_EVENTS = [
    gpu_event("earlier_kernel", 90, 5),
    gpu_event("clock_kernel", 98, 2),
    gpu_event("ag_gemm_kernel", 100, 50),
    gpu_event("Memcpy PtoP (Device -> Device)", 110, 30, stream=13, cat="gpu_memcpy"),
    gpu_event("Memcpy PtoP (Device -> Device)", 140, 30, stream=13, cat="gpu_memcpy"),
    gpu_event("Memcpy DtoD (Device -> Device)", 150, 4, cat="gpu_memcpy"),
    gpu_event("wait_sources_kernel", 154, 16),
    gpu_event("ncclDevKernel_ReduceScatter", 170, 10, stream=20),
    gpu_event("flux_megatron: wgrad", 180, 20, cat="gpu_user_annotation"),
    gpu_event("nvjet_tst", 180, 20),
    gpu_event("aten::mm", 150, 1, cat="cpu_op"),
]


def test_kinds_of_gpu_work_are_distinguished():
    spans = timeline.read(GPU_EVENTS, phases.PREFIX)
    by_lane = {lane: [s.begin_us for s in spans if s.lane == lane] for lane in timeline.LANES}
    assert by_lane == {
        COMPUTE: [0, 50, 80], COMMUNICATION: [10, 40, 70], WAIT: [54], PASS: [80],
    }  # fmt: skip
    one = Timeline(0, spans)
    # pushes for 60 us, of which 44 under the GEMM and the copy; the collective under nothing
    assert (one.time_us, one.communication_us, one.hidden_us) == (100, 70, 44)
    assert one.hidden_share == pytest.approx(44 / 70)


def test_on_the_cpu_phases_are_drawn():
    events = [
        gpu_event(f"flux_megatron: {name}", begin, 10, cat="user_annotation")
        for begin, name in enumerate(["clock", "fprop", "gather push", "ag_gemm kernel"])
    ]
    for event, begin_us in zip(events, (0, 10, 12, 25), strict=True):
        event["ts"] = begin_us
    assert timeline.read(events, phases.PREFIX) == [
        Span(PASS, "fprop", 0, 10),
        Span(COMMUNICATION, "gather push", 2, 12),
        Span(COMPUTE, "ag_gemm kernel", 15, 25),
    ]


def test_a_rank_that_does_not_communicate_hides_nothing():
    assert Timeline(0, [Span(COMPUTE, "gemm", 0, 5)]).summary()["hidden_share"] is None


def test_intervals():
    assert timeline.union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert timeline.overlap([(0, 4), (5, 8)], [(3, 6), (7, 9)]) == [(3, 4), (5, 6), (7, 8)]


WAITS = KernelWaits("ag_gemm", [KernelWait(0, 4, 1, 2, 5), KernelWait(1, 5, 1, 3, 4),
                                KernelWait(1, 6, 2, 6, 6.5)], lost=0)  # fmt: skip


def test_waits_of_programs():
    assert (WAITS.ctas, WAITS.mean_us) == (2, 2.25)
    steps = [(2, 1), (3, 2), (4, 1), (5, 0), (6, 1), (6.5, 0)]
    assert timeline.waiting_over_time(WAITS) == steps
    (summary,) = Timeline(0, [], [WAITS]).summary()["waits_in_kernels"]
    assert summary["mean_us_by_source"] == {1: 2.0, 2: 0.25}
    assert summary["longest"][0] == {"cta": 0, "tile": 4, "source": 1, "us": 3}


def test_ranks_are_merged_on_one_clock(tmp_path):
    arrow = {"ph": "s", "id": 5, "pid": 0, "tid": 7, "ts": 101, "name": "ac2g", "cat": "ac2g"}
    named = {"ph": "M", "name": "process_name", "pid": 99, "ts": 0, "args": {"name": "python"}}
    traces = [
        RankTrace(Timeline(rank, [], [WAITS]), [*GPU_EVENTS, arrow, named], 1000 * rank, 100)
        for rank in range(2)
    ]
    merge.write(traces, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    begins = {e["pid"]: e["ts"] for e in events if e["name"] == "clock_kernel"}
    assert begins == {0: 98, 1: 99}
    assert {e["id"] for e in events if e["ph"] == "s"} == {"0.5", "1.5"}
    waits = [(e["pid"], e["tid"], e["ts"], e["dur"]) for e in events if e.get("cat") == "wait"]
    assert waits == [(1000, 0, 102, 3), (1000, 1, 103, 1), (1001, 0, 103, 3), (1001, 1, 104, 1)]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == [
        name for r in (0, 1) for name in (f"rank {r}", f"rank {r}: waits inside kernels")
    ]


def test_the_command_traces_its_ranks(tmp_path):
    command = [sys.executable, "-m", "flux_megatron.cli", "trace", "--device", "cpu", "--tp", "2"]
    sizes = ["--M", "16", "--N", "32", "--K", "16", "--strategy", "fused", "--waits"]
    done = subprocess.run(
        [*command, *sizes, "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=200, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "a CTA" in done.stdout
    assert (tmp_path / "timeline.png").stat().st_size > 5_000
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for rank in range(2):
        found = {e["name"].removeprefix(phases.PREFIX) for e in events if e["pid"] == rank}
        assert NAMES["fused"] <= found
        calls = [e for e in events if e["pid"] == rank and e["name"].endswith("ag_gemm kernel")]
        waits = [e for e in events if e["pid"] == 1000 + rank and e["name"].startswith("ag_gemm:")]
        (call,) = calls
        for wait in waits:  # on the clock of the trace
            slack_us = 20_000
            assert call["ts"] - slack_us < wait["ts"]
            assert wait["ts"] + wait["dur"] < call["ts"] + call["dur"] + slack_us
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [rank["rank"] for rank in summary["ranks"]] == [0, 1]
    assert all(rank["time_us"] > rank["compute_us"] > 0 for rank in summary["ranks"])
    assert {k["kernel"] for k in summary["ranks"][0]["waits_in_kernels"]} == {
        "ag_gemm", "reduce_received",
    }  # fmt: skip
    assert str(tmp_path) not in (tmp_path / "summary.json").read_text()


@pytest.mark.parametrize(
    "words", ["--M 33", "--N 33", "--layer row --K 33", "--layer both", "--device tpu"]
)
def test_bad_options_end_before_any_rank_is_started(words, tmp_path):
    command = ["trace", "--device", "cpu", "--tp", "2", *words.split(), "--out", str(tmp_path)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "expected" in result.output
