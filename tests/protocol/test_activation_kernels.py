"""What the experts' activation and scaling touch, interpreted, and what Triton makes of them for
GPUs.
"""

from __future__ import annotations

import pytest
import torch
from compiled_apart import compiled_by, named
from interpreted_access import needs_interpreter
from memory_checker import checked_launches
from triton.runtime.errors import InterpreterError

from flux_megatron.kernels import expert_activation as kernels

CAPACITY, N = 5, 24


def launch(counts: list[list[int]], cut: int = 0) -> None:
    """All four kernels; dy has `cut` rows less than x."""
    received = torch.tensor(counts, dtype=torch.int32)
    x, dy = torch.randn(CAPACITY, 2 * N), torch.randn(CAPACITY, N)
    kernels.gated_forward(x, received, "silu")
    kernels.gated_backward(dy, x, received, "gelu")
    y = kernels.scaled_forward(dy, torch.ones(CAPACITY))
    kernels.scaled_backward(dy[cut:], y, torch.ones(CAPACITY))


@needs_interpreter
@pytest.mark.parametrize("counts", [[[1, 0], [0, 2]], [[0, 0], [0, 0]], [[9, 9], [9, 9]]])
def test_only_their_arguments_are_touched(counts):
    with checked_launches():
        launch(counts)


@needs_interpreter
def test_a_row_too_few_is_noticed():
    with checked_launches(), pytest.raises(InterpreterError, match="past the end of argument dy"):
        launch([[1, 1]], cut=1)


def test_they_compile_and_registers_suffice(tmp_path):
    compiled = compiled_by("compile_activation.py", tmp_path)
    for architecture in ("sm_80", "sm_90", "sm_100"):
        kernel = named(compiled, architecture)
        assert len(kernel) == 12
        assert {one["spilled_bytes"] for one in kernel.values()} == {0}
