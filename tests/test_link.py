"""How a GPU is joined to others: what CUDA says of visible ones, else what NVML says of the node's;
both are pretended.
"""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace

import pytest
import torch

from flux_megatron.tuning import link

UUIDS = [b"GPU-a", b"GPU-b", b"GPU-c"]


class Nvml:
    """The handle of a GPU is its number + 1; `status` is that between two."""

    def __init__(self, gpus: int, status: dict[tuple[int, int], int]) -> None:
        self._gpus, self._status = gpus, status

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count) -> int:
        count._obj.value = self._gpus
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle) -> int:
        handle._obj.value = UUIDS.index(uuid) + 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle) -> int:
        handle._obj.value = index + 1
        return 0

    def nvmlDeviceGetP2PStatus(self, a, b, what: int, status) -> int:
        assert what == 3
        status._obj.value = self._status.get((a.value - 1, b.value - 1), 0)
        return 0


def driver(atomics: int) -> SimpleNamespace:
    kinds = SimpleNamespace(CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED="atomics")
    return SimpleNamespace(
        CUdevice_P2PAttribute=kinds,
        CUresult=SimpleNamespace(CUDA_SUCCESS=0),
        cuDeviceGetP2PAttribute=lambda what, a, b: (0, atomics),
    )


@pytest.fixture
def seen(monkeypatch):
    def seen(visible: int, nvml: Nvml | OSError, atomics: int = 1) -> str:
        def load(name: str) -> Nvml:
            if isinstance(nvml, OSError):
                raise nvml
            return nvml

        monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver(atomics)))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
        properties = SimpleNamespace(uuid="b")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(ctypes, "CDLL", load)
        return link.of(torch.device("cuda", 0))

    return seen


def test_visible_gpus_are_asked_by_cuda(seen):
    no_nvml = OSError("no NVML")
    assert seen(2, no_nvml) == "nvlink"
    assert seen(2, no_nvml, atomics=0) == "pcie"


def test_gpus_that_are_not_visible_are_asked_by_nvml(seen):
    assert seen(1, Nvml(3, {})) == "nvlink"
    assert seen(1, Nvml(3, {(1, 2): 5})) == "pcie"
    assert seen(1, Nvml(3, {(0, 2): 5, (1, 1): 5})) == "nvlink", "it is the second one"


def test_a_gpu_alone_has_no_known_link(seen, monkeypatch):
    assert seen(1, OSError("no NVML")) == "unknown"
    monkeypatch.setattr(sys.modules[__name__], "UUIDS", [b"GPU-b"])
    assert seen(1, Nvml(1, {})) == "unknown"
