"""Compiles own kernels, those of scripts/own_kernel*.py and a rank barrier in each language, for
GPUs that are not there, in a process without the interpreter.

    python compile_device.py FILE    writes JSON: name -> {"ptx", "shared_bytes"}
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import triton  # before our kernels, which would choose the interpreter on a machine without a GPU
import triton.language as tl
from compile_source import code_of, source_of, write_ptx
from triton.compiler import ASTSource
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

import flux_megatron.device.gluon as in_gluon
import flux_megatron.device.triton as in_triton

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import own_kernel
import own_kernel_gluon

_TYPES = {
    **dict.fromkeys(("buffers", "pads"), "*i64"),
    **dict.fromkeys(("counters", "work", "status"), "*i32"),
    "timeout_ns": "i64",
}
_PAYLOAD = ("x", "weight", "y")
_ITEMSIZE = {"bf16": 2, "fp32": 4}


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


def compiled(kernel, architecture: int, dtype: str, num_warps: int, **constexprs) -> dict:
    if "tiles_slot" in kernel.arg_names and num_warps == 8 and dtype == "fp32":
        constexprs["tiles_slot"] = 1  # as a launch fixes numbers that are 1
    types = {**_TYPES, **dict.fromkeys(_PAYLOAD, f"*{dtype}")}
    make = GluonASTSource if isinstance(kernel, gluon._runtime.GluonJITFunction) else ASTSource
    source = source_of(kernel, types, constexprs, ("M_shard", "N"), make)
    return code_of(source, architecture, num_warps=num_warps)


def shipped() -> Iterator[tuple[str, Callable[[], dict]]]:
    sizes = {"EPS": 1e-5, "WORLD_SIZE": 4, "BLOCK_M": 1, "BLOCK_N": 4096}
    ours = own_kernel.all_gather_rms_norm_kernel
    for architecture, dtype in ((90, "bf16"), (80, "fp32")):
        make = partial(compiled, ours, architecture, dtype, 8, **sizes)
        yield f"triton norm sm_{architecture} {dtype}", make
    ours = own_kernel_gluon.all_gather_rms_norm_kernel
    for dtype, block_m, block_n in (("bf16", 1, 4096), ("fp32", 64, 64)):
        layout = own_kernel_gluon.layout(block_m, block_n, _ITEMSIZE[dtype])
        blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "LAYOUT": layout}
        make = partial(compiled, ours, 90, dtype, own_kernel_gluon.NUM_WARPS, **sizes | blocks)
        yield f"gluon norm sm_90 {dtype}", make
    yield "triton barrier sm_90", partial(compiled, barrier_in_triton, 90, "bf16", 4, WORLD_SIZE=4)
    yield "gluon barrier sm_90", partial(compiled, barrier_in_gluon, 90, "bf16", 4, WORLD_SIZE=4)


if __name__ == "__main__":
    write_ptx(dict(shipped()))
