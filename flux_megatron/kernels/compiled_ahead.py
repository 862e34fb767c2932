"""Kernels are compiled ahead of their launches in processes of their own, which need no GPU and
share no lock of Python's. Triton's cache on disk keeps what they make, and that they have done it.

A process that fails, or is late, leaves its kernels to their first launch.

    python -m flux_megatron.kernels.compiled_ahead < JOBS    compiles what `start` has written
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flux_megatron.kernels.triton_launch import Code
from flux_megatron.versions.triton import TRITON

ROOT = Path(__file__).parents[2]
LIMIT_S = 180  # of a process


class Jobs(NamedTuple):
    """`marks` are names in Triton's cache, one for each of the codes."""

    target: tuple[str, int, int]
    codes: Sequence[Code]
    marks: Sequence[str]


def mark_of(code: Code, sources: str) -> str:
    """The name in Triton's cache that says that the code was compiled from these sources."""
    return hashlib.sha256(repr((code, sources, TRITON.version())).encode()).hexdigest()


def is_marked(mark: str) -> bool:
    return _cache(mark).get_file("ahead") is not None


def _cache(mark: str) -> Any:
    return import_module("triton.runtime.cache").get_cache_manager(mark)


def start(codes: Sequence[Code], marks: Sequence[str], device: torch.device) -> Any:
    """A process that compiles these for the device, or None where there can be no more."""
    major, minor = torch.cuda.get_device_capability(device)
    jobs = Jobs(("cuda", 10 * major + minor, 32), codes, marks)
    environment = {
        **os.environ, "CUDA_VISIBLE_DEVICES": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TRITON_INTERPRET": "0",  # which is on where there is no GPU
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PYTHONSAFEPATH": "1",
    }  # fmt: skip
    with tempfile.TemporaryFile() as file, contextlib.suppress(OSError):
        pickle.dump(jobs, file)
        file.seek(0)
        return subprocess.Popen(
            [sys.executable, "-m", __spec__.name], stdin=file, env=environment,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
    return None


def wait(processes: Sequence[Any], limit_s: float) -> None:
    """Until all have ended, or are too late."""
    end = time.monotonic() + limit_s
    for process in processes:
        try:
            process.wait(max(0, end - time.monotonic()))
        except subprocess.TimeoutExpired:  # noqa: PERF203, the others may be done
            process.kill()


class NoGpu:
    """Triton's driver, as far as it compiles."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    """Compile what stands in the standard input."""
    signal.alarm(LIMIT_S)
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    jobs: Jobs = pickle.load(sys.stdin.buffer)
    driver.set_active(NoGpu(GPUTarget(*jobs.target)))
    for code, mark in zip(jobs.codes, jobs.marks, strict=True):
        try:
            _with_launcher(code.compiled())
        except Exception:  # said at the first launch
            traceback.print_exc()
        _cache(mark).put(b"", "ahead")


def _with_launcher(compiled: Any) -> None:
    """Triton 3.6 launches a kernel by a module of C, which it compiles for its signature."""
    nvidia = import_module("triton.backends.nvidia.driver")
    if hasattr(nvidia, "make_launcher"):
        nvidia.CudaLauncher(compiled.src, compiled.metadata)


if __name__ == "__main__":
    main()
