"""What a measured time depends on besides its problem: the machine, the software, our sources."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

PACKAGE = Path(__file__).parents[1]
ROOMS = ("kernels", "overlap", "symm", "expert_parallel")  # whose files run in a call


@dataclass(frozen=True)
class Environment:
    """All of it is part of a measurement's key: where one field differs it is another one.

    `link` joins the GPUs of the node; `max_connections` is CUDA_DEVICE_MAX_CONNECTIONS or "unset";
    `sources` is a digest of the code that runs in a call.
    """

    gpu: str
    link: str
    driver: str
    cuda: str
    torch: str
    triton: str
    max_connections: str
    sources: str


@cache
def of(device: torch.device) -> Environment:
    """The environment of this process and `device`."""
    import triton

    from flux_megatron.tuning import link

    on_gpu = device.type == "cuda"
    return Environment(
        gpu=torch.cuda.get_device_name(device) if on_gpu else device.type,
        link=link.of(device) if on_gpu else "host memory",
        driver=driver_version() if on_gpu else "none",
        cuda=torch.version.cuda or "none",
        torch=torch.__version__,
        triton=triton.__version__,
        max_connections=os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") or "unset",
        sources=sources_digest(),
    )


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The kernel driver's version, such as 580.65.06."""
    try:
        found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", file.read_text())
    except OSError:
        return "unknown"
    return found.group() if found else "unknown"


@cache
def sources_digest(package: Path = PACKAGE) -> str:
    """A digest of all that may run in a call."""
    digest = hashlib.sha256()
    files = (file for room in ROOMS for file in (package / room).rglob("*.[cp]*"))
    for file in sorted(file for file in files if file.suffix in (".c", ".py")):
        digest.update(f"{file.relative_to(package)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]
