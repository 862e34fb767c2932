"""How a GPU is joined to the others of its node."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

NVML = "libnvidia-ml.so.1"
_ATOMICS = 3  # NVML_P2P_CAPS_INDEX_ATOMICS
HIDDEN = ", hidden"


def of(device: torch.device) -> str:
    """ "nvlink" if it has native atomics with every other GPU, as NVLink gives, else "pcie":
    with those that this process sees, or where it sees no other, as under Ray, with those of the
    node, and `HIDDEN` behind it: copies take longer there (`symm.copies`). "unknown" where there is
    none.
    """
    visible = [*_of_visible(device)]
    answers = visible or [*_of_node(device)]
    if not answers:
        return "unknown"
    return ("nvlink" if all(answers) else "pcie") + HIDDEN * (not visible)


def name(link: str) -> str:
    """Without whether a process sees it."""
    return link.removesuffix(HIDDEN)


def _of_visible(device: torch.device) -> Iterator[bool]:
    from cuda.bindings import driver

    attribute = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    for peer in range(torch.cuda.device_count()):
        if peer != device.index:
            error, value = driver.cuDeviceGetP2PAttribute(attribute, device.index, peer)
            yield error == driver.CUresult.CUDA_SUCCESS and bool(value)


def _of_node(device: torch.device) -> Iterator[bool]:
    """By NVML, which does not go by CUDA_VISIBLE_DEVICES. A job's cgroup may hide GPUs from it."""
    try:
        nvml = ctypes.CDLL(NVML)
    except OSError:  # a container without the driver's tools
        return
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
    own, peer = ctypes.c_void_p(), ctypes.c_void_p()
    count, status = ctypes.c_uint(), ctypes.c_int()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(own)):
        return
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for index in range(count.value):
        failed = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(peer))
        if failed or peer.value == own.value:
            continue
        failed = nvml.nvmlDeviceGetP2PStatus(own, peer, _ATOMICS, ctypes.byref(status))
        yield not failed and status.value == 0  # NVML_P2P_STATUS_OK
