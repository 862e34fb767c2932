"""Whether this machine has what a command asks for: a GPU for every rank, or a problem that
interpreted kernels can run. No torch: the answer comes at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from flux_megatron.errors import BadInput

DEVICES = ("cuda", "cpu")
ON_CPU, ON_CPU_MAX = 2, 16  # ranks where no number is asked for, and at most
# multiply-adds of one rank's GEMM that an interpreted kernel does in about a second
INTERPRETED_MAX = 1 << 31


def gpu_count() -> int:
    """GPUs that the driver shows to this process (CUDA_VISIBLE_DEVICES counts)."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def check_device(device: str) -> None:
    if device not in DEVICES:
        raise BadInput(f"--device {device!r} given, one of {', '.join(DEVICES)} expected")


def ranks(
    device: str,
    given: int | None,
    trial: str,
    *,
    option: str = "--tp",
    least: int = 1,
) -> int:
    """The number of ranks on `device`: what `option` has `given`, else all GPUs, or 2 on the CPU.
    `trial`: what tries it out without GPUs.

    `BadInput` where fewer than `least` are given, or this machine cannot run them.
    """
    check_device(device)
    if given is not None and given < least:
        raise BadInput(f"{option} {given} given, at least {least} expected")
    if device == "cpu":
        wanted = ON_CPU if given is None else given
        if wanted > ON_CPU_MAX:
            raise BadInput(f"{option} {wanted} given, at most {ON_CPU_MAX} on the CPU expected")
        return wanted
    found = gpu_count()
    wanted = given or max(found, least)
    if found < wanted:
        fewer = f"{option} {found} fits here; " if found > 1 else ""
        raise BadInput(
            f"{option} {wanted}: as many GPUs expected, {found} found; {fewer}"
            f"{trial} tries it out on the CPU, where kernels are interpreted"
        )
    return wanted


def check_interpreted(sizes: Iterable[tuple[int, int, int]], remedy: str) -> None:
    """`BadInput` with the `remedy` where a rank's GEMM, M x N x K, is too large for the CPU."""
    for M, N, K in sizes:
        if M * N * K > INTERPRETED_MAX:
            raise BadInput(
                f"{M} x {N} x {K} on each rank is too large for kernels that the CPU interprets: "
                f"{remedy}"
            )
