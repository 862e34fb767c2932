"""The copy engine of GPUs, on a driver that only notes what it is asked for."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from ranks import on_device

from flux_megatron.symm.copy_engine import Push
from flux_megatron.symm.cuda_backend import CudaCopyEngine

STREAM, CALLERS, EVENT = 7, 5, 77
PUSHES = tuple(Push(1000 + n, 16 * n, 8 + n, signal=2000 + n) for n in range(3))


class Driver:
    """CUDA's driver, as far as the engine calls it; `done` is what came to the streams."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)

    def __init__(self) -> None:
        self.done: list[tuple] = []

    def CUstream(self, handle: int) -> int:
        return handle

    def CUevent(self, handle: int) -> int:
        return handle

    def cuEventRecord(self, event: int, stream: int) -> tuple[int]:
        return self._note("record", stream)

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> tuple[int]:
        return self._note("follow", stream)

    def cuMemcpyDtoDAsync(self, target: int, source: int, size: int, stream: int) -> tuple[int]:
        return self._note("copy", target, source, size, stream)

    def cuStreamWriteValue32(self, stream: int, address: int, word: int, flags: int) -> tuple[int]:
        return self._note("write", address, word, stream)

    def cuStreamWaitValue32(self, stream: int, address: int, count: int, flags: int) -> tuple[int]:
        return self._note("wait", address, count, stream)

    def _note(self, *what: object) -> tuple[int]:
        self.done.append(what)
        return (0,)


@pytest.fixture
def engine(monkeypatch) -> CudaCopyEngine:
    driver = Driver()
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    stream = SimpleNamespace(cuda_stream=STREAM)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: stream)
    event = SimpleNamespace(record=lambda stream: None, cuda_event=EVENT)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: CALLERS, raising=False)
    return CudaCopyEngine(torch.device("cuda", 0))


def done(engine: CudaCopyEngine) -> list[tuple]:
    return engine._driver.done


@pytest.mark.parametrize("epoch", [1, 2**31, 2**32 + 5])
def test_what_comes_to_the_copy_stream(engine, epoch):
    engine.wait_count(100, 3)
    engine.send(PUSHES, 50, epoch)
    engine.clear((100, 104))
    word = epoch % 2**32
    sent = [
        one
        for push in PUSHES
        for one in (
            ("copy", push.destination, 50 + push.offset, push.size_bytes, STREAM),
            ("write", push.signal, word, STREAM),
        )
    ]
    cleared = [("write", 100, 0, STREAM), ("write", 104, 0, STREAM)]
    assert done(engine) == [("wait", 100, 3, STREAM), *sent, *cleared]


def test_fork_and_join_order_the_two_streams(engine):
    engine.fork()
    engine.join()
    orders = [("record", CALLERS), ("follow", STREAM), ("record", STREAM), ("follow", CALLERS)]
    assert done(engine) == orders


def test_a_refusal_of_the_driver_is_an_error(engine):
    with (
        mock.patch.object(engine._driver, "cuStreamWriteValue32", return_value=(1,)),
        pytest.raises(RuntimeError, match="cuStreamWriteValue32 failed: 1"),
    ):
        engine.send(PUSHES, 50, 1)


def in_a_new_thread(rank: int) -> int:
    """An engine is made where the process has a context and the thread has none, as in backward."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.Stream(device, priority=-1)  # torch keeps a pool, from which the engine's comes
    with ThreadPoolExecutor(1) as pool:
        engine = pool.submit(CudaCopyEngine, device).result()
    engine.fork()
    engine.join()
    torch.cuda.synchronize(device)
    return engine.capture(engine.current())


@pytest.mark.gpu
def test_a_thread_that_has_not_used_a_gpu_yet_makes_an_engine():
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU here")
    assert on_device(in_a_new_thread, 1) == [0]
