"""Triton's driver where there is no GPU: Hopper code is compiled and its launches are recorded.

    python offline_driver.py FILE    writes JSON: {"launches": [...]}

Compiles what `hopper_probe` compiles, then launches one kernel three times and writes what Triton
gave the driver each time. For a process of its own, without the interpreter.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from unittest import mock

import torch
import triton  # before our kernels, which would choose the interpreter on a machine without a GPU
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from flux_megatron.kernels import hopper_ag_gemm, hopper_probe, triton_launch

STREAM = 7


class OfflineDriver:
    """As far as compiling and launching ask Triton's own."""

    launcher_cls = nvidia.CudaLauncher

    def __init__(self) -> None:
        self.launches: list[tuple] = []
        self.utils = SimpleNamespace(
            launch=lambda *given: self.launches.append(given),
            load_binary=lambda *_: (1, 2, 128, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 227 * 1024},
            fill_tma_descriptor_tiled=lambda *given: given,
            build_signature_metadata=list,
        )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return STREAM


def plain(value: object) -> object:
    """Pointers of tensors are what a launch takes; all else is written as it is."""
    if isinstance(value, (tuple, list)):
        return [plain(one) for one in value]
    return str(value.data_ptr()) if isinstance(value, torch.Tensor) else repr(value)


def main(path: str) -> None:
    offline = OfflineDriver()
    nvidia.PyKernelArg = lambda **fields: tuple(fields.items())  # else of Triton's C module
    driver.set_active(offline)
    hopper_probe.compile_kernels("cpu")
    x = torch.zeros(512, 1024, dtype=torch.bfloat16)
    y = [torch.empty(512, 512, dtype=torch.bfloat16)] * 3
    of_torch = {"current_device": lambda: 0}
    stream = {"_cuda_getCurrentRawStream": lambda device: STREAM}
    with (
        mock.patch.multiple(torch.cuda, **of_torch),
        mock.patch.multiple(torch._C, **stream, create=True),
        mock.patch.object(torch.Tensor, "new_empty", return_value=y[0]),
    ):
        for _ in y:
            hopper_ag_gemm.gemm(x, x[:512], "nt")
    launches = [plain(given) for given in offline.launches]
    with open(path, "w") as file:
        json.dump({"triton": triton.__version__, "launches": launches,
                   "counted": triton_launch.launches.total()}, file)  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1])
