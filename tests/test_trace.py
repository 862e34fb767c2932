"""Phases, and `flux-megatron trace`: what it counts as hidden, and its files."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import DEVICE, on_cpu_ranks
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from flux_megatron import ops, settings
from flux_megatron.lab.bench import trace
from flux_megatron.lab.bench.trace import Summary
from flux_megatron.nn.functions import column_parallel_linear, row_parallel_linear
from flux_megatron.overlap import phase as phases

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="bodies are for interpreted ranks")
ROOT = Path(__file__).parents[1]


PASSES = {"fprop", "dgrad", "wgrad"}
MOVED = {"gather push", "local shard", "wait", "reduce"}
NAMES = {
    "fused": PASSES | MOVED | {"ag_gemm kernel", "gemm_rs kernel"},
    "pipelined": PASSES | MOVED | {"gemm chunk", "scatter push"},
    "sequential": PASSES | {"gemm chunk", "wait", "all-gather", "reduce-scatter"},
}


@pytest.mark.parametrize("strategy", NAMES)
@on_cpu_ranks(2, environment={"FLUX_MEGATRON_STRATEGY": "{strategy}"})
def test_every_phase_has_a_name_that_is_documented(rank, strategy):
    group = dist.group.WORLD
    shapes = (8, 32), (16, 32), (16, 16)
    x, w, h = (torch.randn(shape, requires_grad=True) for shape in shapes)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        column_parallel_linear(x, w, None, group=group).sum().backward()
        row_parallel_linear(h, w.t().contiguous(), group=group).sum().backward()
    found = [event.name.partition(phases.PREFIX) for event in profiler.events()]
    names = {name for _, prefix, name in found if prefix}
    assert names == NAMES[strategy]
    for name in names:
        assert re.search(rf"\b{name}\b", phases.__doc__), name


def test_unseen_phases_are_one_object():
    assert ops.phase("wait") is ops.phase("reduce")


def test_nvtx_ranges_are_for_the_asking(monkeypatch):
    named = mock.MagicMock()
    monkeypatch.setattr(torch.cuda.nvtx, "range", named)
    monkeypatch.setenv("FLUX_MEGATRON_NVTX", "1")
    settings.reload()
    with ops.phase("wait"):
        pass
    monkeypatch.undo()
    settings.reload()
    with ops.phase("reduce"):
        pass
    named.assert_called_once_with("flux_megatron: wait")


def event(name, begin_us, time_us, device=DeviceType.CUDA):
    span = SimpleNamespace(start=begin_us, end=begin_us + time_us)
    return SimpleNamespace(name=name, device_type=device, time_range=span)


def test_what_a_gpu_ran_is_summed_by_kind():
    assert trace.union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert trace.length([(0, 4), (5, 8)]) == 7
    events = [
        event("void at::native::spin_kernel(long)", 0, 90),  # aligns the ranks, as the next does
        event("ncclDevKernel_AllReduce_Sum_f32", 90, 5),
        event("ag_gemm_kernel", 100, 50),
        event("Memcpy PtoP (Device -> Device)", 110, 30),
        event("Memcpy PtoP (Device -> Device)", 140, 30),
        event("Memcpy DtoD (Device -> Device)", 150, 4),
        event("wait_sources_kernel", 154, 16),
        event("ncclDevKernel_ReduceScatter", 170, 10),
        event("flux_megatron: wgrad", 180, 20),  # a range, not work
        event("nvjet_tst", 180, 20),
        event("aten::mm", 0, 500, DeviceType.CPU),
    ]
    # pushes for 60 us, of which 44 beside the GEMM and the copy; the collective beside nothing
    assert trace.summarize(events) == Summary(100, 74, 70, 44)


def test_on_the_cpu_phases_are_summed():
    names = enumerate(("fprop", "gather push", "ag_gemm kernel", "somebody else's"))
    events = [event(phases.PREFIX + name, 10 * n, 15, DeviceType.CPU) for n, name in names]
    assert trace.summarize(events) == Summary(25, 15, 15, 5)


def test_the_command_traces_its_ranks(tmp_path):
    command = [sys.executable, "-m", "flux_megatron.cli", "trace", "--device", "cpu", "--tp", "2"]
    sizes = ["--M", "16", "--N", "32", "--K", "16", "--strategy", "fused"]
    done = subprocess.run(
        [*command, *sizes, "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=200, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "hidden" in done.stdout
    for rank in range(2):
        text = (tmp_path / f"trace_rank-{rank}.json").read_text()
        found = {e["name"].removeprefix(phases.PREFIX) for e in json.loads(text)["traceEvents"]}
        assert NAMES["fused"] <= found
