"""What a measured time depends on besides its problem: the machine, the software, our sources."""

from __future__ import annotations

import ast
import hashlib
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

PACKAGE = Path(__file__).parents[1]
# What runs in a call; choosing, measuring and counting do not.
SOURCES = ("kernels/*.py", "overlap/*.py", "symm/*.py")
NOT_RUN = {
    "beside",
    "choice",
    "dispatch",
    "environment",
    "norm",
    "plan_cache",
    "registry",
    "report",
    "timing",
    "trial",
    "tuner",
}


@dataclass(frozen=True)
class Environment:
    """All of it is part of a measurement's key: where one field differs it is another one.

    `link` joins the GPUs of the node; `max_connections` is CUDA_DEVICE_MAX_CONNECTIONS or "unset";
    `sources` a digest of the code that runs in a call.
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

    on_gpu = device.type == "cuda"
    return Environment(
        gpu=torch.cuda.get_device_name(device) if on_gpu else device.type,
        link=_link(device) if on_gpu else "host memory",
        driver=driver_version() if on_gpu else "none",
        cuda=torch.version.cuda or "none",
        torch=torch.__version__,
        triton=triton.__version__,
        max_connections=os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") or "unset",
        sources=sources_digest(PACKAGE),
    )


def _link(device: torch.device) -> str:
    """ "nvlink" if every pair of visible GPUs has native atomics between them, as NVLink gives."""
    from cuda.bindings import driver

    attribute = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    peers = [peer for peer in range(torch.cuda.device_count()) if peer != device.index]
    if not peers:
        return "unknown"
    answers = [driver.cuDeviceGetP2PAttribute(attribute, device.index, peer) for peer in peers]
    joined = all(error == driver.CUresult.CUDA_SUCCESS and value for error, value in answers)
    return "nvlink" if joined else "pcie"


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The kernel driver's version, such as 580.65.06."""
    try:
        found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", file.read_text())
    except OSError:
        return "unknown"
    return found.group() if found else "unknown"


def sources_digest(package: Path) -> str:
    """A digest of the code of kernels, strategies and transport, comments and layout aside."""
    digest = hashlib.sha256()
    for file in sorted(file for pattern in SOURCES for file in package.glob(pattern)):
        if file.stem not in NOT_RUN:
            digest.update(f"{file.relative_to(package)} {_code(file)}\n".encode())
    return digest.hexdigest()[:16]


def _code(file: Path) -> str:
    """The file without comments, docstrings and layout."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and _is_text(body[0]):
            del body[0]
    return ast.unparse(tree)


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
