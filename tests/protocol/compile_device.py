"""Compiles own kernels, those of scripts/own_kernel*.py and a rank barrier in each language, for
GPUs that are not there, in a process without the interpreter.

    python compile_device.py FILE    writes JSON: name -> {"ptx", "shared_bytes"}
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton  # before our kernels, which would choose the interpreter on a machine without a GPU
import triton.language as tl
from compile_source import write_ptx
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import flux_megatron.device.gluon as in_gluon
import flux_megatron.device.triton as in_triton
from flux_megatron.kernels.triton_launch import Code

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import own_kernel
import own_kernel_gluon

# as `Code` has them; the last are rank, epoch, timeout_ns
_POINTERS, _WORDS, _NUMBERS = torch.int64, torch.int32, (3, 3, (1 << 32) + 3)


@triton.jit
def barrier_in_triton(
    x, y, buffers, pads, status, rank, epoch, timeout_ns: tl.int64, WORLD_SIZE: tl.constexpr
):
    at = tl.arange(0, 1024)
    deadline = in_triton.deadline_after(timeout_ns)
    for peer in range(WORLD_SIZE):
        in_triton.put_tile(buffers, peer, rank * 1024 + at, tl.load(x + at))
    in_triton.rank_barrier(pads, rank, 0, epoch, deadline, status, WORLD_SIZE)
    received = in_triton.peer_pointer(buffers, rank, x.dtype.element_ty)
    tl.store(y + at, tl.load(received + at))


@gluon.jit
def barrier_in_gluon(
    x, y, buffers, pads, status, rank, epoch, timeout_ns: gl.int64, WORLD_SIZE: gl.constexpr
):
    at = gl.arange(0, 1024, layout=gl.BlockedLayout([8], [32], [4], [0]))
    deadline = in_gluon.deadline_after(timeout_ns)
    for peer in range(WORLD_SIZE):
        in_gluon.put_tile(buffers, peer, rank * 1024 + at, gl.load(x + at))
    in_gluon.rank_barrier(pads, rank, 0, epoch, deadline, status, WORLD_SIZE)
    received = in_gluon.peer_pointer(buffers, rank, x.dtype.element_ty)
    gl.store(y + at, gl.load(received + at))


def code(kernel: Any, arguments: tuple, num_warps: int) -> Code:
    return Code(kernel.__module__, kernel.__name__, arguments, (("num_warps", num_warps),))


def norm(ours: ModuleType, dtype: torch.dtype, block_m: int, block_n: int) -> Code:
    """Of four ranks. A launch fixes a `tiles_slot` of 1, as that of fp32 is here."""
    tiles_slot = 1 if dtype == torch.float32 else 3
    arguments = (
        dtype, dtype, dtype, 16, 16, tiles_slot, _POINTERS, _POINTERS, _WORDS, _WORDS, _WORDS,
        *_NUMBERS, 1e-5, 4, block_m, block_n,
    )  # fmt: skip
    if ours is own_kernel_gluon:
        arguments += (own_kernel_gluon.layout(block_m, block_n, dtype.itemsize),)
    return code(ours.all_gather_rms_norm_kernel, arguments, 8)


def barrier(kernel: Any) -> Code:
    payload, memory = (torch.bfloat16, torch.bfloat16), (_POINTERS, _POINTERS, _WORDS)
    return code(kernel, (*payload, *memory, *_NUMBERS, 4), 4)


if __name__ == "__main__":
    bf16, fp32 = torch.bfloat16, torch.float32
    write_ptx({
        "triton norm sm_90 bf16": (norm(own_kernel, bf16, 1, 4096), 90),
        "triton norm sm_80 fp32": (norm(own_kernel, fp32, 1, 4096), 80),
        "gluon norm sm_90 bf16": (norm(own_kernel_gluon, bf16, 1, 4096), 90),
        "gluon norm sm_90 fp32": (norm(own_kernel_gluon, fp32, 64, 64), 90),
        "triton barrier sm_90": (barrier(barrier_in_triton), 90),
        "gluon barrier sm_90": (barrier(barrier_in_gluon), 90),
    })  # fmt: skip
