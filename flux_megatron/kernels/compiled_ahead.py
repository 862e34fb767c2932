"""Kernels are compiled ahead of their launches in processes of their own, which need no GPU and
share no lock of Python's. Triton's cache on disk keeps what they make, and that they have done it.

One process imports torch and Triton, and forks one for each kernel. A process that fails, or is
late, leaves its kernel to the first launch.

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
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

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
    at_once: int


def mark_of(code: Code, sources: str) -> str:
    """The name in Triton's cache that says that the code was compiled from these sources."""
    return hashlib.sha256(repr((code, sources, TRITON.version())).encode()).hexdigest()


def is_marked(mark: str) -> bool:
    return _cache(mark).get_file("ahead") is not None


def _cache(mark: str) -> Any:
    return import_module("triton.runtime.cache").get_cache_manager(mark)


def start(codes: Sequence[Code], marks: Sequence[str], at_once: int, device: torch.device) -> Any:
    """A process that has these compiled for the device, `at_once` at a time, or None where there
    can be no more.
    """
    major, minor = torch.cuda.get_device_capability(device)
    jobs = Jobs(("cuda", 10 * major + minor, 32), codes, marks, at_once)
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
            stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    return None


def wait(process: Any, limit_s: float) -> None:
    """Until it has ended, or is too late: then it ends with all that it has forked."""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


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
    signal.alarm(LIMIT_S)  # what it forks has a limit of its own
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    # numpy's threads, which hold nothing that compiling needs
    warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
    jobs: Jobs = pickle.load(sys.stdin.buffer)
    driver.set_active(NoGpu(GPUTarget(*jobs.target)))
    import_module("triton.backends.nvidia.compiler")
    for module in dict.fromkeys(code.module for code in jobs.codes):
        import_module(module)  # once for all that are forked
    for number, (code, mark) in enumerate(zip(jobs.codes, jobs.marks, strict=True)):
        if number >= jobs.at_once:
            os.wait()
        if not os.fork():
            _compile(code, mark)
    with contextlib.suppress(ChildProcessError):
        while os.wait():
            pass


def _compile(code: Code, mark: str) -> NoReturn:
    signal.alarm(LIMIT_S)
    try:
        _with_launcher(code.compiled())
    except Exception:  # said at the first launch
        traceback.print_exc()
    _cache(mark).put(b"", "ahead")
    os._exit(0)


def _with_launcher(compiled: Any) -> None:
    """Triton 3.6 launches a kernel by a module of C, which it compiles for its signature."""
    nvidia = import_module("triton.backends.nvidia.driver")
    if hasattr(nvidia, "make_launcher"):
        nvidia.CudaLauncher(compiled.src, compiled.metadata)


if __name__ == "__main__":
    main()
