"""The provenance of rows: machine, versions and clocks."""

from __future__ import annotations

import os
import subprocess
import uuid
from dataclasses import replace
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path

import torch

from flux_megatron.errors import BadInput
from flux_megatron.lab.bench.records import Provenance
from flux_megatron.tuning import environment

WITHOUT_MULTICAST = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "UB_SKIPMC": "1",
}


OF_MACHINE = ("gpu", "driver", "cuda", "torch", "triton", "max_connections")


def refuse_multicast() -> None:
    """Raise `BadInput` unless the environment forbids NVLink multicast to every library."""
    wrong = {n: os.environ.get(n) for n, v in WITHOUT_MULTICAST.items() if os.environ.get(n) != v}
    if wrong:
        expected = " ".join(f"{name}={value}" for name, value in WITHOUT_MULTICAST.items())
        raise BadInput(
            f"{wrong} given, {expected} expected: results are labelled NVLS off. "
            "--allow-multicast allows NVLink multicast, which not every machine survives"
        )


def describe(
    device: torch.device, world_size: int, dtype: torch.dtype, scale: int, nvls: bool, commit: str
) -> Provenance:
    """The provenance of a new run, without clocks. `commit` where the sources have no .git."""
    machine = environment.of(device)
    on_gpu = device.type == "cuda"
    return Provenance(
        run=uuid.uuid4().hex[:8],
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        commit=commit or _commit(),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if on_gpu else "none",
        nvls="on" if nvls else "off",
        world_size=world_size,
        dtype=str(dtype).removeprefix("torch."),
        scale=scale,
        **{name: getattr(machine, name) for name in OF_MACHINE},
    )


def with_clocks(run: Provenance, device: torch.device) -> Provenance:
    if device.type != "cuda":
        return run
    pynvml = import_module("pynvml")  # of nvidia-ml-py
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    return replace(
        run,
        clock_mhz=pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
        power_w=pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
        power_limit_w=pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
    )


def _commit() -> str:
    """The commit of the sources, "+dirty" where they differ from it, "unknown" without git."""
    package = Path(__file__).parents[2]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        sha = git("rev-parse", "--short=12", "HEAD")
        return sha + ("+dirty" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
