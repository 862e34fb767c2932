"""The memory checker notices a wrong address, and only that."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from interpreted_access import needs_interpreter
from memory_checker import checked_launches
from triton.runtime.errors import InterpreterError

pytestmark = needs_interpreter


@triton.jit
def scale(source, result, n, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if MASKED:
        tl.store(result + at, tl.load(source + at, mask=at < n) * 2, mask=at < n)
    else:
        tl.store(result + at, tl.load(source + at) * 2)


@triton.jit
def count(counters, at):
    tl.atomic_add(counters + at, 1)


def test_right_addresses_pass():
    source, result = torch.arange(12.0), torch.zeros(12)
    with checked_launches():
        scale[(2,)](source, result, 12, BLOCK=8, MASKED=True)
    assert torch.equal(result, source * 2)


@pytest.mark.parametrize(
    ("n_source", "n_result", "argument"), [(12, 16, "source"), (16, 12, "result")]
)
def test_wrong_load_and_store_name_the_argument(n_source, n_result, argument):
    storage = torch.zeros(64)  # a view's neighbours are not the view
    with (
        checked_launches(),
        pytest.raises(InterpreterError, match=f"0 bytes past the end of argument {argument}"),
    ):
        scale[(2,)](storage[:n_source], storage[32 : 32 + n_result], 16, BLOCK=8, MASKED=False)


def test_wrong_atomic():
    counters = torch.zeros(4, dtype=torch.int32)
    with (
        checked_launches(),
        pytest.raises(InterpreterError, match="atomic of 4 bytes 8 bytes past the end"),
    ):
        count[(1,)](counters, 6)
    assert not counters.any()


def test_nothing_is_left_behind():
    with checked_launches():
        count[(1,)](torch.zeros(4, dtype=torch.int32), 3)
    storage = torch.zeros(8, dtype=torch.int32)
    count[(1,)](storage[:4], 6)  # unchecked again: within the storage, beyond the view
    assert storage[6] == 1
