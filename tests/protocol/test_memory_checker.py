"""The memory checker notices a wrong address, and only that."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import triton
import triton.language as tl
from interpreted_access import needs_interpreter
from memory_checker import checked_launches
from triton.runtime.errors import InterpreterError

pytestmark = needs_interpreter
STORED, PLACE = 12, 3  # elements, and which of the counters


@triton.jit
def double_and_count(source, result, counters, n, place, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(result + at, tl.load(source + at, mask=at < n) * 2, mask=at < n)
    tl.atomic_add(counters + place, 1)


def launch(*sizes: int) -> list[torch.Tensor]:
    """With views of such sizes, whose neighbours in memory are not theirs."""
    views = [torch.arange(32.0)[: sizes[0]], *(torch.zeros(32)[:size] for size in sizes[1:])]
    double_and_count[(2,)](*views, STORED, PLACE, BLOCK=8)
    return views


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((12, 12, 4), ""),
        ((8, 12, 4), "load of 4 bytes 0 bytes past the end of argument source"),
        ((12, 8, 4), "store of 4 bytes 0 bytes past the end of argument result"),
        ((12, 12, 2), "atomic of 4 bytes 4 bytes past the end of argument counters"),
    ],
)
def test_a_wrong_address_names_the_argument(sizes, said):
    refused = pytest.raises(InterpreterError, match=said) if said else nullcontext()
    with checked_launches(), refused:
        source, result, counters = launch(*sizes)
    if not said:
        assert torch.equal(result, source * 2)
        assert counters.tolist() == [0, 0, 0, 2]
    launch(*sizes)  # unchecked again: within the storage, beyond the view
