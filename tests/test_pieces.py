"""Calls that the caller has a turn in, on a driver that notes what is done: those in pieces, and
those that lend their rows. Real strategies are in `protocol/test_offline_calls.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from fake_engines import CALLERS, NEEDS, OTHER, PUSHES, STREAM, engines
from test_stops import Space, operands
from torch import Tensor

from flux_megatron.kernels.triton_launch import empty
from flux_megatron.overlap import steady as steady_module
from flux_megatron.overlap.pieces import InPieces
from flux_megatron.overlap.steady import Steady
from flux_megatron.symm.recording import by_torch, lend

pytest_plugins = ("fake_engines",)
pytestmark = NEEDS
SIGNAL, ROWS = 3000, 4000
FORK = [("record", CALLERS), ("follow", STREAM)]
JOIN = [("record", STREAM), ("follow", CALLERS)]
START = [*FORK, ("copy", STREAM), ("write", STREAM), ("torch", CALLERS)]
COMPLETE = [("copy", CALLERS)]
CLOSE = [("write", STREAM), *JOIN]


class Pieces:
    """A strategy's call in pieces, or with a turn of the caller's in its middle."""

    def __init__(self, space: Space, x: Tensor, w: Tensor) -> None:
        self.space, self.x, self.engine = space, x, space.engine
        self.engine.follow()
        space.epoch += 1
        space.open = True
        self.engine.fork()
        self.engine.send(PUSHES[:1], x.data_ptr(), space.epoch)
        self.y = empty(x, len(x), len(w))
        by_torch(space.gemm, x, w.t(), self.y)

    def complete(self) -> Tensor:
        self.engine.follow()
        self.engine.copy_here(ROWS, self.x.data_ptr(), 8)
        return self.space.region[self.space.epoch % 2]

    def finish(self) -> Tensor:
        self.engine.follow()
        self.engine.signal(SIGNAL, self.space.epoch)
        self.engine.join()
        self.space.open = False
        return self.y

    def close(self) -> None:
        self.finish()


@pytest.fixture
def space(driver, monkeypatch) -> Iterator[Space]:
    monkeypatch.setattr(steady_module, "_watched", lambda: False)
    space = Space(engines()[1], driver)
    monkeypatch.setattr(space.engine, "capture", lambda stream: 0)
    yield space
    assert not list(driver.done()), "all is looked at"


def start(steady: Steady, space: Space, number: int) -> InPieces | Pieces:
    x, w = operands(number)
    return steady.started(x, w, lambda: Pieces(space, x, w))


def done(space: Space) -> list[tuple]:
    return [(what, stream) for what, stream, *_ in space.driver.done()]


def listed(space: Space) -> Steady:
    """After a gather of each parity."""
    steady = Steady(space, "gather", True)
    for number in range(2):
        call = start(steady, space, number)
        call.complete()
        call.close()
    done(space)
    return steady


def test_each_piece_enqueues_what_the_strategys_does(space):
    steady, by_list = Steady(space, "gather", True), []
    for number in range(8):
        call = start(steady, space, number)
        by_list.append(isinstance(call, InPieces))
        assert space.open
        assert done(space) == START
        assert call.complete() is space.region[space.epoch % 2]
        assert [*space.driver.done()] == [("copy", CALLERS, ROWS, operands_of(call), 8)]
        assert space.open
        call.close()
        assert not space.open
        (_, _, *written), *joined = space.driver.done()
        assert written == [SIGNAL, number + 1, 0]
        assert [one[:2] for one in joined] == JOIN
    assert by_list == [False] * 2 + [True] * 6
    assert space.epoch == 8


def operands_of(call: InPieces | Pieces) -> int:
    """The address of x."""
    if isinstance(call, InPieces):
        return call._begun[2][2]
    return getattr(call, "_pieces", call).x.data_ptr()


def test_a_reduction_in_pieces_gives_its_result(space):
    steady, by_list = Steady(space, "gather", True), []
    for number in range(6):
        x, w = operands(number)
        call = steady.started(x, w, lambda x=x, w=w: Pieces(space, x, w))
        by_list.append(isinstance(call, InPieces))
        assert torch.equal(call.finish(), x @ w.t())
        assert done(space) == [*START, *CLOSE]
    assert by_list == [False] * 2 + [True] * 4


def test_rows_are_lent_where_the_strategy_lends_them(space):
    steady, by_list = Steady(space, "gather", True), []

    def consume(rows: Tensor) -> None:
        assert rows is space.region[space.epoch % 2]
        space.driver.by_torch(OTHER)
        if not by_list[-1]:
            space.engine.fork()  # of another call: no recording has it

    def made(x: Tensor, w: Tensor) -> Tensor:
        call = Pieces(space, x, w)
        lend(consume, call.complete())
        return call.finish()

    for number in range(6):
        x, w = operands(number)
        by_list.append(True)
        if (y := steady.run(x, w, None, consume)) is None:
            by_list[-1] = False
            with steady.recorded(x, w, None) as result:
                y = result(made(x, w))
        assert torch.equal(y, x @ w.t())
        of_another = [] if by_list[-1] else FORK
        assert done(space) == [*START, *COMPLETE, ("torch", OTHER), *of_another, *CLOSE]
    assert by_list == [False] * 2 + [True] * 4


def test_an_error_of_the_caller_breaks_the_group_off(space):
    steady = Steady(space, "gather", True)

    def consume(rows: Tensor) -> None:
        raise ValueError("no wgrad")

    for number in range(2):
        x, w = operands(number)
        with steady.recorded(x, w, None) as result:
            call = Pieces(space, x, w)
            lend(lambda rows: None, call.complete())
            result(call.finish())
    done(space)
    with pytest.raises(ValueError, match="no wgrad"):
        steady.run(*operands(1), None, consume)
    assert space.open
    assert space.broken == "no wgrad"
    assert done(space) == [*START, *COMPLETE]


def test_an_error_of_a_piece_breaks_the_group_off(space):
    call = start(listed(space), space, 1)
    done(space)
    space.driver.refuse(0, 719)
    with pytest.raises(RuntimeError, match="cuMemcpyDtoDAsync failed: 719"):
        call.complete()
    assert space.open
    assert "failed: 719" in space.broken


def test_pieces_follow_the_callers_stream(space, monkeypatch):
    """The caller goes on with a call in another stream than it began in."""
    call = start(listed(space), space, 1)
    assert done(space) == START
    used: list[tuple[int, int]] = []
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: OTHER)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: OTHER)
    monkeypatch.setattr(
        Tensor, "record_stream", lambda one, stream: used.append((one.data_ptr(), stream))
    )
    call.complete()
    y = call.finish()
    assert used == [(y.data_ptr(), OTHER)], "freed, it would be another call's of the first stream"
    ordered = [("record", CALLERS), ("follow", OTHER)]
    joined = [("record", STREAM), ("follow", OTHER)]
    assert done(space) == [*ordered, ("copy", OTHER), ("write", STREAM), *joined]


def test_another_x_is_left_to_the_strategy(space):
    steady = listed(space)
    x, w = operands(1)
    assert isinstance(steady.started(x[:2], w, lambda: Pieces(space, x[:2], w)), Pieces)
    assert done(space) == START


def test_a_gather_may_be_closed_early(space):
    """It enqueues what `complete` would have."""
    steady = listed(space)
    call = start(steady, space, 1)
    call.close()
    assert done(space) == [*START, *COMPLETE, *CLOSE]
    assert not space.open


def test_a_gather_without_its_rows_is_not_kept(space):
    steady = Steady(space, "gather", True)
    for number in range(3):
        call = start(steady, space, number)
        assert not isinstance(call, InPieces)
        call.close()
    assert steady.refused == "its rows were not asked for"
    done(space)
