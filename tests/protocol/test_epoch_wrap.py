"""Waits of compiled kernels where epochs wrap around at 2^31, interpreted: on the CPU the host
waits instead, and a GPU would need 2^31 calls.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from interpreted_access import needs_interpreter

from flux_megatron.kernels import primitives, word_primitives
from flux_megatron.symm import signals

pytestmark = needs_interpreter

LAST = 2**31 - 1  # the int32 behind it is -2**31


@triton.jit
def _clock():
    return tl.full((), 2**62, tl.int64)


@triton.jit
def _of_one_warp(number, flag):
    return number, flag


@triton.jit
def wait_kernel(pad, status, epoch, WAIT: tl.constexpr):
    WAIT(pad, 0, epoch, 0, status)


@triton.jit
def look_kernel(slots, out, epoch, SOURCES: tl.constexpr, LOOK: tl.constexpr):
    at = tl.arange(0, 2)[:, None] * 2 + tl.arange(0, 2)[None, :]
    total, missing = LOOK(slots, at, at >= 0, 4, epoch, tl.float32, SOURCES, 1)
    tl.store(out, missing)
    tl.store(out + 1, tl.sum(total).to(tl.int32))


@triton.jit
def receive_kernel(slots, status, epoch, RECEIVE: tl.constexpr):
    at = tl.arange(0, 2)[:, None] * 2 + tl.arange(0, 2)[None, :]
    RECEIVE(slots, at, at >= 0, 4, epoch, 0, 0, status, slots.to(tl.int64), tl.float32, 1, 1)


@pytest.fixture(autouse=True)
def _interpretable(monkeypatch):
    """Without the clock and the votes of warps, which are PTX."""
    monkeypatch.setattr(primitives, "_time_ns", _clock)
    monkeypatch.setattr(word_primitives, "time_ns", _clock)
    monkeypatch.setattr(word_primitives, "_agreed", _of_one_warp)


@pytest.mark.parametrize("expected", [1, LAST - 1, LAST, LAST + 1, LAST + 2, 2**32, 2**32 + 1])
@pytest.mark.parametrize("ahead", [-2, -1, 0, 1, 2])
def test_a_signal_is_compared_around_the_wrap(expected, ahead):
    """A later epoch ends the wait; an earlier one is late, and recorded."""
    pad = torch.tensor([signals.as_int32(expected + ahead)], dtype=torch.int32)
    status = torch.zeros(signals.STATUS_WORDS, dtype=torch.int32)
    epoch = signals.as_int32(expected)
    wait_kernel[(1,)](pad, status, epoch, WAIT=primitives._wait_acquire_sys_device)
    late = status[signals.STATUS_TRIPPED].item() == signals.STATUS_LATE
    assert late == (ahead < 0)
    # whose loop has asked whether time is over
    assert status[signals.STATUS_OVER] == late
    if late:
        assert status[signals.STATUS_EXPECTED] == epoch
        assert status[signals.STATUS_SEEN] == pad[0]


def packets(epochs: list[int]) -> torch.Tensor:
    """Words of 1.0, one an epoch."""
    one = torch.tensor([1.0]).view(torch.int32).long()
    return torch.tensor([signals.as_int32(epoch) for epoch in epochs]) << 32 | one


@pytest.mark.parametrize("epoch", [1, LAST - 1, LAST, LAST + 1, LAST + 2, 2**32 + 1])
@pytest.mark.parametrize("other", [-2, -1, 1, 2, -(2**31)])
def test_a_word_of_another_epoch_is_missing_around_the_wrap(epoch, other):
    out = torch.zeros(2, dtype=torch.int32)
    options = {"SOURCES": 2, "LOOK": word_primitives._look}
    look_kernel[(1,)](packets([epoch] * 8), out, signals.as_int32(epoch), **options)
    assert out.tolist() == [0, 8]
    for source in range(2):
        epochs = [epoch] * 8
        epochs[4 * source + 3] = epoch + other
        look_kernel[(1,)](packets(epochs), out, signals.as_int32(epoch), **options)
        assert out[0] == source + 1


@pytest.mark.parametrize("epoch", [LAST, LAST + 1, LAST + 2])
def test_a_word_that_does_not_come_is_recorded_around_the_wrap(epoch):
    status = torch.zeros(signals.STATUS_WORDS, dtype=torch.int32)
    words = packets([epoch, epoch, epoch - 1, epoch])
    receive = word_primitives._receive_sum_device
    receive_kernel[(1,)](words, status, signals.as_int32(epoch), RECEIVE=receive)
    assert status[signals.STATUS_TRIPPED] == signals.STATUS_LATE
    assert status[signals.STATUS_EXPECTED] == signals.as_int32(epoch)
    assert status[signals.STATUS_SEEN] == signals.as_int32(epoch - 1)
