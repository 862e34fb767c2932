"""The copy engine of GPUs, on a driver that only notes what it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fake_engines import CALLERS, EPOCHS, NEEDS, STREAM, engine
from ranks import on_device_ranks

from flux_megatron.symm.cuda_backend import CudaCopyEngine

pytest_plugins = ("fake_engines",)


def pretended(test: Callable) -> Callable:
    for mark in NEEDS:
        test = mark(test)
    return test


@pretended
@pytest.mark.parametrize("epoch", EPOCHS)
def test_what_comes_to_the_copy_stream(driver, epoch):
    made = engine()
    made.wait_count(100, 3)
    made.copy(1000, 50, 8)
    made.signal(2000, epoch)
    made.write(100, 0)
    assert [*driver.done()] == [
        ("wait", STREAM, 100, 3, 0),
        ("copy", STREAM, 1000, 50, 8),
        ("write", STREAM, 2000, epoch % 2**32, 0),
        ("write", STREAM, 100, 0, 0),
    ]


@pretended
def test_fork_and_join_order_the_two_streams(driver):
    made = engine()
    made.fork()
    made.join()
    orders = [("record", CALLERS), ("follow", STREAM), ("record", STREAM), ("follow", CALLERS)]
    assert [one[:2] for one in driver.done()] == orders


@pretended
def test_a_refusal_of_the_driver_is_an_error(driver):
    driver.refuse(0, code=1)
    with pytest.raises(RuntimeError, match="cuStreamWriteValue32 failed: 1"):
        engine().signal(2000, 1)


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
