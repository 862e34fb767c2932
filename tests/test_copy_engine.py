"""The copy engine of GPUs, on a driver that only notes what it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fake_engines import CALLERS, EPOCHS, GATED_PUSHES, NEEDS, STREAM, engines
from ranks import on_device_ranks

from flux_megatron.symm.copy_engine import CopyEngine
from flux_megatron.symm.cuda_backend import CudaCopyEngine

pytest_plugins = ("fake_engines",)


def pretended(test: Callable) -> Callable:
    for mark in NEEDS:
        test = mark(test)
    return test


@pretended
@pytest.mark.parametrize("epoch", EPOCHS)
def test_gated_pushes_wait_push_signal_and_clear_their_counters(driver, epoch):
    """What the engine gives the driver in few calls is what any engine does in many."""
    engine, _ = engines()
    for _ in range(2):  # the second time what was kept of the first is used
        engine.push_gated(GATED_PUSHES, 50, epoch)
        together = [*driver.done()]
        CopyEngine.push_gated(engine, GATED_PUSHES, 50, epoch)
        assert together == [*driver.done()]
    expected = [
        one
        for gated in GATED_PUSHES
        for one in (
            ("wait", STREAM, gated.counter, gated.tiles, 0),
            ("copy", STREAM, gated.push.destination, 50 + gated.push.offset, gated.push.size_bytes),
            ("write", STREAM, gated.push.signal, epoch % 2**32, 0),
        )
    ]
    cleared = [("write", STREAM, gated.counter, 0, 0) for gated in GATED_PUSHES]
    assert together == expected + cleared


@pretended
def test_fork_and_join_order_the_two_streams(driver):
    engine, _ = engines()
    engine.fork()
    engine.join()
    orders = [("record", CALLERS), ("follow", STREAM), ("record", STREAM), ("follow", CALLERS)]
    assert [one[:2] for one in driver.done()] == orders


@pretended
def test_a_refusal_of_the_driver_is_an_error(driver):
    driver.refuse(2, code=1)
    with pytest.raises(RuntimeError, match="cuStreamBatchMemOp failed: 1"):
        engines()[0].push_gated(GATED_PUSHES, 50, 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@on_device_ranks(1)
def test_a_thread_that_has_not_used_a_gpu_yet_makes_an_engine(rank):
    """An engine is made where the process has a context and the thread has none, as in backward."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.Stream(device, priority=-1)  # torch keeps a pool, from which the engine's comes
    with ThreadPoolExecutor(1) as pool:
        engine = pool.submit(CudaCopyEngine, device).result()
    engine.fork()
    engine.join()
    torch.cuda.synchronize(device)
    assert engine.capture(engine.current()) == 0
