"""The phases of a call, as ranges of profilers."""

import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import DEVICE, on_cpu_ranks
from torch.profiler import ProfilerActivity, profile

from flux_megatron import ops, settings
from flux_megatron.nn.functions import column_parallel_linear, row_parallel_linear
from flux_megatron.overlap import phase as phases

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="bodies are for interpreted ranks")


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
