"""How a GPU is joined to others: what CUDA says of visible ones, else what NVML says of the node's;
both are pretended.
"""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from flux_megatron.tuning import link

UUIDS = [b"GPU-a", b"GPU-b", b"GPU-c"]


def nvml(gpus: int, status: dict[tuple[int, int], int]) -> SimpleNamespace:
    """The handle of a GPU is its number + 1; `status` is that between two."""

    def answer(place, value: int) -> int:
        place._obj.value = value
        return 0

    def between(a, b, what: int, place) -> int:
        assert what == 3
        return answer(place, status.get((a.value - 1, b.value - 1), 0))

    return SimpleNamespace(
        nvmlInit_v2=lambda: 0,
        nvmlDeviceGetCount_v2=lambda place: answer(place, gpus),
        nvmlDeviceGetHandleByUUID=lambda uuid, place: answer(place, UUIDS.index(uuid) + 1),
        nvmlDeviceGetHandleByIndex_v2=lambda index, place: answer(place, index + 1),
        nvmlDeviceGetP2PStatus=between,
    )


@pytest.fixture
def seen(monkeypatch):
    def seen(visible: int, nvml: SimpleNamespace | OSError, atomics: int = 1) -> str:
        driver = mock.MagicMock()
        driver.CUresult.CUDA_SUCCESS = 0
        kind = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
        driver.cuDeviceGetP2PAttribute = lambda what, a, b: (0, atomics if what is kind else None)
        monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
        properties = SimpleNamespace(uuid="b")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(ctypes, "CDLL", mock.Mock(side_effect=[nvml]))
        return link.of(torch.device("cuda", 0))

    return seen


def test_visible_gpus_are_asked_by_cuda(seen):
    no_nvml = OSError("no NVML")
    assert seen(2, no_nvml) == "nvlink"
    assert seen(2, no_nvml, atomics=0) == "pcie"


def test_gpus_that_are_not_visible_are_asked_by_nvml(seen):
    assert seen(1, nvml(3, {})) == "nvlink"
    assert seen(1, nvml(3, {(1, 2): 5})) == "pcie"
    assert seen(1, nvml(3, {(0, 2): 5, (1, 1): 5})) == "nvlink", "it is the second one"


def test_a_gpu_alone_has_no_known_link(seen, monkeypatch):
    assert seen(1, OSError("no NVML")) == "unknown"
    monkeypatch.setattr(sys.modules[__name__], "UUIDS", [b"GPU-b"])
    assert seen(1, nvml(1, {})) == "unknown"
