"""Calls with functions of torch's between their lists, on a driver that notes what is done: the
order of everything, what is computed, and what ends such a call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import fake_driver
import pytest
import torch
from fake_driver import Driver
from fake_engines import CALLERS, NEEDS, OTHER, PUSHES, STREAM, engines
from torch import Tensor

from flux_megatron.dispatch import Decision
from flux_megatron.kernels.triton_launch import empty
from flux_megatron.overlap import hopper, pipelined, sequential
from flux_megatron.overlap import steady as steady_module
from flux_megatron.overlap.steady import Steady
from flux_megatron.patterns import COLUMN
from flux_megatron.problem import Plan, Problem
from flux_megatron.symm import recording
from flux_megatron.symm.cuda_backend import CudaCopyEngine
from flux_megatron.symm.recording import Recording, Unrecordable, by_torch

pytest_plugins = ("fake_engines",)
pytestmark = NEEDS
SIGNAL, EVENT = 3000, fake_driver.EVENT
M, N, K = 4, 8, 4  # of x @ w.t(); then come as many rows of the region


class Space:
    """A workspace, a channel of it, and a strategy with library GEMMs."""

    unavailable = None

    def __init__(self, engine: CudaCopyEngine, driver: Driver) -> None:
        self.engine, self.channels, self.broken = engine, {"gather": self}, ""
        self.epoch, self.open, self._regions = 0, False, (1, 2)
        self.region = [torch.full((M, K), 3.0), torch.full((M, K), 5.0)]
        self.driver = driver
        self.before_gemm: Callable[[], None] = lambda: None

    def poison(self, region: int) -> None: ...

    def break_off(self, error: BaseException) -> None:
        self.broken = str(error)

    def gemm(self, x: Tensor, right: Tensor, out: Tensor) -> None:
        self.before_gemm()
        self.driver.by_torch(CALLERS, x.data_ptr(), right.data_ptr(), out.data_ptr())
        torch.mm(x, right, out=out)

    def call(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        engine = self.engine
        engine.follow()
        self.epoch += 1
        engine.fork()
        engine.send(PUSHES[:1], x.data_ptr(), self.epoch)
        y = empty(x, 2 * M, N)
        by_torch(self.gemm, x[:3], w.t(), y[:3])
        engine.signal(SIGNAL, self.epoch)
        by_torch(self.gemm, x[3:], w.t(), y[3:M])
        by_torch(self.gemm, self.region[self.epoch % 2], w.t(), y[M:])
        engine.join()
        if bias is not None:
            by_torch(Tensor.add_, y, bias)
        return y

    def expected(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        """Of the last call."""
        y = torch.cat([x, self.region[self.epoch % 2]]) @ w.t()
        return y if bias is None else y + bias

    def enqueued(self, x: Tensor, w: Tensor, y: Tensor) -> list[tuple]:
        """By the last call."""
        push, row, at = PUSHES[0], y[0].nbytes, y.data_ptr()
        rows = [x.data_ptr(), x[3:].data_ptr(), self.region[self.epoch % 2].data_ptr()]
        gemms = [
            ("torch", CALLERS, one, w.data_ptr(), at + first * row)
            for one, first in zip(rows, (0, 3, M), strict=True)
        ]
        return [
            ("record", CALLERS, EVENT, 0, 0), ("follow", STREAM, EVENT, 0, 0),
            ("copy", STREAM, push.destination, x.data_ptr() + push.offset, push.size_bytes),
            ("write", STREAM, push.signal, self.epoch, 0),
            gemms[0], ("write", STREAM, SIGNAL, self.epoch, 0), *gemms[1:],
            ("record", STREAM, EVENT, 0, 0), ("follow", CALLERS, EVENT, 0, 0),
        ]  # fmt: skip


@pytest.fixture
def space(driver, monkeypatch) -> Space:
    monkeypatch.setattr(steady_module, "_watched", lambda: False)
    return Space(engines()[1], driver)


def operands(number: int) -> tuple[Tensor, Tensor]:
    """Elsewhere each time, and not at the beginning of their storages."""
    memory = torch.arange(200.0) + number
    return memory[16 : 16 + M * K].view(M, K), memory[100 : 100 + N * K].view(N, K)


def made(steady: Steady, space: Space, *given: Tensor | None) -> tuple[Tensor, bool]:
    """A call's result, and whether lists made it."""
    if (y := steady.run(*given)) is not None:
        return y, True
    with steady.recorded(*given) as result:
        return result(space.call(*given)), False


def listed(space: Space, bias: Tensor | None = None) -> Steady:
    """After a call of each parity."""
    steady = Steady(space, "gather", True)
    for number in range(2):
        made(steady, space, *operands(number), bias)
    list(space.driver.done())
    return steady


@pytest.mark.parametrize("biased", [False, True])
def test_lists_and_functions_do_what_the_strategy_does(space, biased):
    steady, kept, by_list = Steady(space, "gather", True), [], []
    for number in range(8):
        x, w = operands(number)
        bias = (torch.arange(2.0 * N) + number)[::2] if biased else None
        y, listed = made(steady, space, x, w, bias)
        by_list.append(listed)
        assert [*space.driver.done()] == space.enqueued(x, w, y), f"call {number}, {listed}"
        assert torch.equal(y, space.expected(x, w, bias)), f"call {number}, {listed}"
        kept.append(y)
    assert by_list == [False] * 2 + [True] * 6
    assert space.epoch == 8
    assert not space.open
    assert len({one.data_ptr() for one in kept}) == 8


@pytest.mark.parametrize(
    ("strategy", "listed"),
    [(hopper, [True] * 6), (pipelined, [True] * 6), (sequential, [False] * 6)],
)
def test_every_kind_of_call_of_a_recordable_strategy_may_be_listed(space, strategy, listed):
    problem = Problem(COLUMN, 512, 512, 512, "bfloat16", 2)
    decision = Decision("gemm", strategy, Plan("hopper"), space, None, "a call", problem)
    for _ in range(2):  # the first call of a kind is never listed
        kinds = [decision.steady[kind] for kind in range(6)]
    assert [bool(kind._attempts) for kind in kinds] == listed


def test_nothing_of_a_call_that_is_left_to_the_strategy_is_done(space):
    steady = listed(space)
    x, w = operands(1)
    shifted = torch.zeros(200)[1 : 1 + M * K].view(M, K)
    assert steady.run(shifted, w, None) is None, "not aligned"
    space.driver.word("fake_capturing").value = 1
    assert steady.run(x, w, None) is None, "in a capture"
    assert not [*space.driver.done()]
    assert not space.open


def test_an_error_of_a_function_breaks_the_group_off(space):
    steady = listed(space)

    def refuse() -> None:
        raise RuntimeError("out of memory")

    space.before_gemm = refuse
    with pytest.raises(RuntimeError, match="out of memory"):
        steady.run(*operands(1), None)
    assert space.open
    assert space.broken == "out of memory"
    assert [what for what, *_ in space.driver.done()] == ["record", "follow", "copy", "write"]


@pytest.mark.parametrize("refused", [5, 9])
def test_an_error_of_a_later_list_breaks_the_group_off(space, refused):
    steady = listed(space)
    space.driver.refuse(refused, 719)
    with pytest.raises(RuntimeError, match=r"cu\w+ failed: 719"):
        steady.run(*operands(1), None)
    assert space.open
    assert "failed: 719" in space.broken


def test_later_lists_come_after_the_calls_of_other_threads(space, monkeypatch):
    monkeypatch.setattr(space.engine, "capture", lambda stream: 0)
    steady = listed(space)
    space.before_gemm = lambda: setattr(space.engine, "_last", OTHER)
    made(steady, space, *operands(1), None)
    done = [(what, stream) for what, stream, *_ in space.driver.done()]
    ordered = [("record", OTHER), ("follow", CALLERS)]
    gemm = [("torch", CALLERS), *ordered]
    pushed = [("record", CALLERS), ("follow", STREAM), ("copy", STREAM), ("write", STREAM)]
    joined = [("record", STREAM), ("follow", CALLERS)]
    assert done == [*pushed, *gemm, ("write", STREAM), *gemm, *gemm, *joined]


def test_a_recording_has_nothing_of_other_threads(space):
    x, w = operands(1)
    noted = Recording(x, w, None)
    with recording.noted(noted):
        other = threading.Thread(target=lambda: (space.engine.fork(), empty(x, 4)))
        other.start()
        other.join()
        assert not noted.operations
        assert not noted.made
        with recording.noted(None):
            space.engine.fork()
        assert not noted.operations
        space.engine.fork()
        assert len(noted.operations) == 2
    assert recording.this_thread.recording is None


def test_operands_of_another_dtype_are_not_recorded(space):
    x, w = operands(1)
    noted = Recording(x, w, None)
    with recording.noted(noted):
        by_torch(Tensor.zero_, x.view(torch.int32))
    with pytest.raises(Unrecordable, match=r"torch\.int32 given within a tensor of torch\.float32"):
        noted.steps(0)
