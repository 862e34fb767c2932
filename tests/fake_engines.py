"""Copy engines on the driver of `fake_driver`: a plugin with its fixtures."""

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
from flux_megatron.symm.cuda_backend import CudaCopyEngine

NEEDS = [
    pytest.mark.skipif(not fake_driver.compiler(), reason="no C compiler"),
    # a process that has bound the lists to this driver would keep it
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real driver"),
]

STREAM, CALLERS, OTHER = 7, 5, 9
FUNCTION = 33  # the handle of the kernel that tests launch
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


def engine() -> CudaCopyEngine:
    """One whose calls C may make."""
    made = CudaCopyEngine(torch.device("cuda", 0))
    made.runs_lists = True
    return made
