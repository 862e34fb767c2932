"""Copy engines on the driver of `fake_driver`: a plugin with its fixtures, and what tests push."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import fake_driver
import pytest
import torch
from fake_driver import Driver

from flux_megatron import settings
from flux_megatron.symm import enqueue
from flux_megatron.symm.copy_engine import GatedPush, Push
from flux_megatron.symm.cuda_backend import CudaCopyEngine
from flux_megatron.symm.native_engine import NativeCopyEngine

NEEDS = [
    pytest.mark.skipif(not fake_driver.compiler(), reason="no C compiler"),
    # a process that has bound the lists to this driver would keep it
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real driver"),
]

STREAM, CALLERS, OTHER = 7, 5, 9
FUNCTION = 33  # the handle of the kernel that tests launch
PUSHES = tuple(Push(1000 + 64 * n, 16 * n, 8 + n, signal=2000 + 4 * n) for n in range(3))
BOXES = tuple(
    Push(1000 + 64 * n, 16 * n, 8 + n, signal=2000 + 4 * n, rows=2 + n, pitch_bytes=32)
    for n in range(3)
)
GATED_PUSHES = tuple(GatedPush(100 + 4 * n, 3 + n, push) for n, push in enumerate(PUSHES))
EPOCHS = [1, 2**31, 2**32 + 5]


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    return fake_driver.build(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def driver(library, monkeypatch, tmp_path_factory) -> Driver:
    driver = Driver(library)
    driver.refuse(-1)
    driver.expect_parameters(FUNCTION)
    driver.word("fake_capturing").value = 0
    driver.count.value = 0
    monkeypatch.setattr(enqueue, "DRIVER", str(library))
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    stream = SimpleNamespace(cuda_stream=STREAM)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: stream)
    event = SimpleNamespace(record=lambda stream: None, cuda_event=fake_driver.EVENT)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: CALLERS, raising=False)
    enqueue.native.cache_clear()
    monkeypatch.setenv("FLUX_MEGATRON_NATIVE", "1")
    settings.reload()
    yield driver
    monkeypatch.delenv("FLUX_MEGATRON_NATIVE")
    settings.reload()
    enqueue.native.cache_clear()


def engines() -> list[CudaCopyEngine]:
    device = torch.device("cuda", 0)
    return [CudaCopyEngine(device), NativeCopyEngine(device)]
