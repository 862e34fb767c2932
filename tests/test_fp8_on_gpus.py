"""What FP8 does on GPUs, as far as a CPU can see it: what the library is given, which GPUs have it,
how a gather of scales is enqueued, and by what a tile is divided before it travels in e4m3.
"""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from flux_megatron.kernels import launch
from flux_megatron.kernels.hopper import epilogue as hopper_epilogue
from flux_megatron.overlap import library_gemm
from flux_megatron.overlap.gather import gather_rows
from flux_megatron.problem import Pattern, Plan, Problem
from flux_megatron.scaling import E4M3, Scaling, block_shapes
from flux_megatron.symm.program import CallProgram, Move

GPU = torch.device("cuda", 0)
PROBLEM = Problem(Pattern.AG_GEMM, 512, 512, 512, "float8_e4m3fn", 2, out_dtype="bfloat16")
ONE = torch.ones(1)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_bias_in_fp32_is_added_to_what_the_library_gives(out_dtype):
    x, w, bias = (torch.ones(shape) for shape in ((16, 32), (16, 32), (16,)))
    given: list[torch.Tensor | None] = []

    def library(x, right, of_x, of_w, bias, out_dtype, use_fast_accum, out):
        given.append(bias)
        return (x @ right + (0 if bias is None else bias)).to(out_dtype)

    with (
        mock.patch.object(torch, "_scaled_mm", library),
        mock.patch.object(library_gemm, "_in_library", return_value=True),
    ):
        y = library_gemm.scaled_gemm(x, w, bias, Scaling(ONE, ONE, out_dtype, False, False))
    assert (given[0] is None) == (out_dtype is torch.float32)
    assert torch.equal(y, torch.full_like(y, 33))


@pytest.mark.parametrize(
    ("capability", "has_it"), [((8, 0), False), ((8, 9), True), ((9, 0), True)]
)
def test_fp8_needs_compute_capability_8_9(capability, has_it, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(launch, "supports_tensors", lambda *given: None)
    said = None if has_it else "FP8 needs a GPU of compute capability 8.9 or more, this one has 8.0"
    assert launch.supports_scaled(PROBLEM) == said
    x = SimpleNamespace(device=GPU)
    assert library_gemm._in_library(x, Scaling(ONE, ONE, torch.bfloat16, False, False)) == has_it


def test_a_trial_that_lacks_memory_says_nothing_of_the_library(monkeypatch):
    tried = library_gemm._refusal.__wrapped__
    monkeypatch.setattr(library_gemm, "_by_library", mock.Mock(side_effect=RuntimeError("no such")))
    assert tried(torch.device("cpu"), 4).endswith("no GEMM with blockwise scales: no such")
    lacks = mock.Mock(side_effect=torch.OutOfMemoryError)
    monkeypatch.setattr(library_gemm, "_by_library", lacks)
    with pytest.raises(torch.OutOfMemoryError):
        tried(torch.device("cpu"), 4)


def test_the_library_takes_blockwise_scales_of_four_rows_each():
    with mock.patch.object(library_gemm, "_refusal", return_value=None):
        assert library_gemm.blocks_refused(GPU, 8, 512) is None
        said = library_gemm.blocks_refused(GPU, 6, 512)
    assert said == "6 rows in a GEMM with blockwise scales, a multiple of 4 expected"


@pytest.mark.parametrize("comm_rows", [64, 256])
def test_scales_are_pushed_before_the_first_signal_and_held_like_x(comm_rows):
    """A rank that has seen a signal reads them; the caller may free them when the call is over."""
    space = SimpleNamespace(rank=1, world_size=4, timeout_ns=10**9, group=None, mailboxes=False)
    x = torch.empty(256, 512, dtype=E4M3)
    scales = [torch.empty(shape) for shape in block_shapes(256, 512, 512)]
    scaling = Scaling(*scales, torch.bfloat16, True, True)
    plan = Plan("pipelined", comm_rows=comm_rows)
    program = CallProgram(space, plan, x, None, None, "", True, scaling)
    program.built_by(gather_rows)
    moves = [
        step for segment in program.segments for _, steps in segment for step in steps
        if isinstance(step, Move) and step.method in ("copy", "signal")
    ]  # fmt: skip
    of_peer = ["copy", "copy", "signal", *["copy", "signal"] * (256 // comm_rows - 1)]
    assert [step.method for step in moves] == of_peer * 3
    scale_moves = moves[:: len(of_peer)]
    assert {step.operands[1] for step in scale_moves} == {program.scaling.x.operand}
    assert [*program.held] == [program.x, program.scaling.x]


class Float32:
    """A number of a kernel: fp32, or its bits."""

    def __init__(self, value):
        self.value = value

    def to(self, dtype, bitcast=True):
        return Float32(self.value.view(dtype))

    def __rshift__(self, bits):
        return Float32(self.value >> bits)

    def __lshift__(self, bits):
        return Float32(self.value << np.int32(bits))

    def __sub__(self, number):
        return Float32(self.value - np.int32(number))

    def __rsub__(self, number):
        return Float32(np.int32(number) - self.value)


GL = SimpleNamespace(
    int32=np.int32, float32=np.float32, abs=lambda one: one, max=lambda one, axis: one,
    maximum=lambda one, least: Float32(np.maximum(one.value, np.int32(least))),
)  # fmt: skip


def test_a_tile_is_divided_by_a_power_of_two_that_e4m3_holds():
    """From the least normal number to the largest: 448 is the largest of e4m3."""

    def scale_of(value: np.ndarray) -> tuple[Float32, Float32]:
        with mock.patch.dict(hopper_epilogue.e4m3_scale.fn.__globals__, {"gl": GL}):
            return hopper_epilogue.e4m3_scale.fn(Float32(value))

    scale, inverse = scale_of(np.zeros(1, np.float32))  # nothing is held
    assert scale.value > 0
    assert np.isfinite(inverse.value)
    least = np.float32(2) ** np.arange(-119, 128, dtype=np.float32)
    for value in (least, least * np.float32(1.9999999)):
        scale, inverse = scale_of(value)
        divided = value * inverse.value
        assert divided.min() >= 128
        assert divided.max() < 256
        assert np.all(scale.value * inverse.value == 1)
        assert np.array_equal(np.frexp(scale.value)[0], np.full_like(scale.value, 0.5))
