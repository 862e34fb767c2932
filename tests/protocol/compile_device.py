"""Compiles own kernels, those of scripts/own_kernel*.py and one with a rank barrier in each
language, for GPUs that are not there, in a process without the interpreter.

    python compile_device.py FILE    writes JSON: name -> {"ptx", "shared_bytes"}
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from barrier_kernel import all_to_all_kernel
from compile_source import write_ptx
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import flux_megatron.device.gluon as in_gluon
from flux_megatron.kernels.triton_launch import Code

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import own_kernel
import own_kernel_gluon

# the arguments of a call, as `Code` has them; the last are rank, epoch, timeout_ns
_CALL = (*[torch.int64] * 2, *[torch.int32] * 3, 3, 3, (1 << 32) + 3)


@gluon.jit
def barrier_in_gluon(
    x, y, N, buffers, pads, counters, work, status, rank, epoch, timeout_ns: gl.int64,
    WORLD_SIZE: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    at = gl.arange(0, BLOCK, layout=gl.BlockedLayout([8], [32], [4], [0]))
    deadline = in_gluon.deadline_after(timeout_ns)
    for peer in range(WORLD_SIZE):
        in_gluon.put_tile(buffers, peer, rank * BLOCK + at, gl.load(x + at))
    in_gluon.rank_barrier(pads, rank, 0, epoch, deadline, status, WORLD_SIZE)
    received = in_gluon.peer_pointer(buffers, rank, x.dtype.element_ty)
    gl.store(y + at, gl.load(received + at))


def code(kernel: Any, num_warps: int, *arguments: Any) -> Code:
    return Code(kernel.__module__, kernel.__name__, arguments, (("num_warps", num_warps),))


def norm(ours: ModuleType, dtype: torch.dtype, block_m: int, block_n: int) -> Code:
    """Of four ranks. A launch fixes a `tiles_slot` of 1, as that of fp32 is here."""
    tiles_slot = 1 if dtype == torch.float32 else 3
    arguments = (*[dtype] * 3, 16, 16, tiles_slot, *_CALL, 1e-5, 4, block_m, block_n)
    if ours is own_kernel_gluon:
        arguments += (own_kernel_gluon.layout(block_m, block_n, dtype.itemsize),)
    return code(ours.all_gather_rms_norm_kernel, 8, *arguments)


def barrier(kernel: Any) -> Code:
    return code(kernel, 4, torch.bfloat16, torch.bfloat16, 16, *_CALL, 4, 1024)


if __name__ == "__main__":
    bf16, fp32 = torch.bfloat16, torch.float32
    write_ptx({
        "triton norm sm_90 bf16": (norm(own_kernel, bf16, 1, 4096), 90),
        "triton norm sm_80 fp32": (norm(own_kernel, fp32, 1, 4096), 80),
        "gluon norm sm_90 bf16": (norm(own_kernel_gluon, bf16, 1, 4096), 90),
        "gluon norm sm_90 fp32": (norm(own_kernel_gluon, fp32, 64, 64), 90),
        "triton barrier sm_90": (barrier(all_to_all_kernel), 90),
        "gluon barrier sm_90": (barrier(barrier_in_gluon), 90),
    })  # fmt: skip
