"""What the kernels of rows touch, interpreted, and what Triton makes of them for GPUs: those of
norms and of the experts' activation and scaling.

The compiled norms are what the forward's and backward's claim to memory bandwidth rests on, as
far as instructions show it: x is loaded once, in units of 16 bytes, and registers suffice.
"""

from __future__ import annotations

import pytest
import torch
from compiled_apart import check_shared_memory, named
from interpreted_access import needs_interpreter
from memory_checker import checked_launches
from ptx_order import Ptx
from triton.runtime.errors import InterpreterError

from flux_megatron.kernels import norm
from flux_megatron.kernels.experts import activation, scaled
from flux_megatron.kernels.experts.activation import Gate

SCRIPT = "compile_rows.py"
CAPACITY, FFN = 5, 24
WIDE_LOAD = r"ld\.global\.\S*v4|cp\.async\.c[ag]\.shared\.global.*, 0x10,"


def launch(M: int, N: int, center: bool, cut: int = 0) -> None:
    """Forward and backward on M rows that lie 8 elements further apart than their width N; the
    result has room for `cut` rows less.
    """
    x = torch.randn(M, N + 8)[:, :N]
    weight = torch.ones(N)
    bias = torch.ones(N) if center else None
    _, mean, rstd = norm.norm_forward(x, weight, bias, eps=1e-5, one_plus=False, center=center)
    dy = torch.randn(M, N)[cut:]
    norm.norm_backward(dy, x, weight, mean, rstd, one_plus=True, bias=center)


@needs_interpreter
@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize(("M", "N"), [(1, 1), (70, 100), (3, 5000)])
def test_only_its_arguments_are_touched(M, N, center):
    with checked_launches():
        launch(M, N, center)


def of_experts(counts: list[list[int]], cut: int = 0) -> None:
    """All four kernels, with biases and without; dy has `cut` rows less than x."""
    received = torch.tensor(counts, dtype=torch.int32)
    x, dy = torch.randn(CAPACITY, 2 * FFN), torch.randn(CAPACITY, FFN)
    experts, scale = received.shape[1], torch.ones(CAPACITY)
    ends = received.sum(0).cumsum(0).to(torch.int32)
    wide, narrow = (scaled.Bias(torch.ones(experts, n), ends) for n in (2 * FFN, FFN))
    for gate, of_gate, of_row in (
        (Gate("silu"), None, None), (Gate("quick_gelu", 7.0, 1.0), wide, narrow)
    ):  # fmt: skip
        activation.gated_forward(x, received, gate, scale, of_gate)
        activation.gated_backward(dy, x, received, gate, scale, of_gate)
        y = scaled.scaled_forward(dy, scale, of_row)
        scaled.scaled_backward(dy[cut:], y, scale, of_row)


@needs_interpreter
@pytest.mark.parametrize("counts", [[[1, 0], [0, 2]], [[0, 0], [0, 0]], [[9, 9], [9, 9]]])
def test_only_their_arguments_are_touched_by_those_of_experts(counts):
    with checked_launches():
        of_experts(counts)


@needs_interpreter
@pytest.mark.parametrize("too_few", [lambda: launch(70, 100, True, cut=1),
                                     lambda: of_experts([[1, 1]], cut=1)])  # fmt: skip
def test_a_row_too_few_is_noticed(too_few):
    with checked_launches(), pytest.raises(InterpreterError, match="past the end of argument dy"):
        too_few()


def test_shared_memory_suffices(compiled):
    check_shared_memory(compiled)


def test_registers_suffice(compiled):
    """All but a few, in LayerNorm's backward of the widest rows."""
    assert len(named(compiled, "experts")) == 3 * 20
    for name, kernel in compiled.items():
        few = 100 if {"layer_norm", "backward", "12288"} <= {*name.split()} else 0
        assert kernel["spilled_bytes"] <= few, name


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("N", [4096, 8192, 12288])
def test_operands_are_loaded_once_in_wide_units(compiled, N, kind):
    tile = norm.tile_of(N)
    units = tile.block_n * 2 // (tile.num_warps * 32 * 16)  # of 16 bytes a thread, for each operand
    # backward of narrower rows loads the first rows before the loop and the next ones in it
    rows_ahead = tile.num_stages
    operands = {
        "forward": 3 if kind == "layer_norm" else 2,  # x, weight, bias
        "backward": 1 + 2 * rows_ahead,  # weight, and x and dy of each row
    }
    for direction, number in operands.items():
        for name, kernel in named(compiled, kind, direction, "bf16", str(N)).items():
            found = Ptx(kernel["ptx"]).find(WIDE_LOAD)
            assert len(found) == number * units, name
