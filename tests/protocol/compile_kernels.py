"""Compiles kernels for GPUs that are not there, in a process of its own without the interpreter.

    python compile_kernels.py FILE    writes JSON: name -> {"ptx": ..., "shared_bytes": ...}

Compiled are all kernels in all configurations that the strategies ship, for sm_80 and sm_90, those
of one type for sm_100, and the broken kernels that the checks must reject.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
import triton  # noqa: F401, before our kernels: see `compile_source`
from broken_kernels import BROKEN
from compile_source import code_of, source_of, write_ptx

from flux_megatron.kernels.portable.ag_gemm import ag_gemm_kernel
from flux_megatron.kernels.portable.gemm_rs import gemm_rs_kernel
from flux_megatron.kernels.portable.reduce_received import reduce_received_kernel
from flux_megatron.kernels.portable.signalled_gemm import signalled_gemm_kernel
from flux_megatron.kernels.portable.wait_sources import wait_sources_kernel
from flux_megatron.kernels.rank_barrier import rank_barrier_kernel
from flux_megatron.overlap import fused
from flux_megatron.problem import Pattern, Problem, Tile

SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8e4nv"}
_WIDE = ("float32", "bfloat16", "float16")
ARCHITECTURES = {80: _WIDE, 90: _WIDE, 100: ("bfloat16",)}
FP8_ARCHITECTURES = (89, 90)
_TYPES = {
    **dict.fromkeys(("timeout_ns", "half_words"), "i64"),
    **dict.fromkeys(("pad", "status", "counters", "work_counter", "entries", "flag"), "*i32"),
    "table": "*i32",
    **dict.fromkeys(("epochs", "work", "arrivals"), "*i32"),
    **dict.fromkeys(("partials", "x_scale", "w_scale"), "*fp32"),
    **dict.fromkeys(("received_pointers", "pad_pointers", "word_pointers"), "*i64"),
}
_RESULTS = ("bias", "y", "received_here")
_PAYLOAD = ("x", "gathered", "w", *_RESULTS, "received", "out", "source", "target")


def compiled(kernel, architecture: int, dtype: str, tile: Tile, **constexprs) -> dict:
    """What Triton makes of `kernel` for sm_<architecture>."""
    types = {**_TYPES, **dict.fromkeys(_PAYLOAD, f"*{SHORT[dtype]}")}
    if dtype == "float8_e4m3fn":
        types |= dict.fromkeys(_RESULTS, "*bf16")
    source = source_of(kernel, types, constexprs, ("M_shard", "N", "K"))
    return code_of(source, architecture, num_warps=tile.num_warps, num_stages=tile.num_stages)


def constants(tile: Tile, layout_nn: bool) -> dict[str, object]:
    """Of a GEMM of four ranks."""
    return {
        "WORLD_SIZE": 4, "GROUP_M": tile.group_m, "LAYOUT_NN": layout_nn,
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
        "TMA": tile.tma, "NUM_WARPS": tile.num_warps,
    }  # fmt: skip


def shipped_tiles(architecture: int, dtype: str) -> set[Tile]:
    """Every tile that the fused strategy chooses; those with TMA also without, for odd views."""
    capability = (architecture // 10, architecture % 10)
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
        tiles = {
            fused.default_plan(
                Problem(Pattern.AG_GEMM, M, N, 1024, dtype, world_size=4, device="cuda")
            ).tile
            for M in (128, 8192)  # shards of few and of many rows
            for N in (4096, 4 * 1001)  # 16-byte rows or not
        }
    return tiles | {replace(tile, tma=False) for tile in tiles}


def shipped(architecture: int, dtypes: Iterable[str]) -> Iterator[tuple[str, Callable[[], dict]]]:
    prefix = f"sm_{architecture}"
    for dtype in dtypes:
        for tile in shipped_tiles(architecture, dtype):
            make = partial(compiled, architecture=architecture, dtype=dtype, tile=tile)
            shape = f"{tile.block_m}x{tile.block_n}x{tile.block_k}"
            for layout_nn in (False, True):
                name = f"{dtype} {shape}{' tma' * tile.tma} {'nn' if layout_nn else 'nt'}"
                common = constants(tile, layout_nn)
                unscaled = {**common, "SCALED": False}
                # with a bias in one layout only: it does not touch the order of anything
                ag = {**unscaled, "HAS_BIAS": layout_nn}
                yield f"{prefix} ag_gemm {name}", partial(make, ag_gemm_kernel, **ag)
                yield f"{prefix} gemm_rs {name}", partial(make, gemm_rs_kernel, **unscaled)
                if dtype == "bfloat16" and not layout_nn:  # else it differs from gemm_rs in nothing
                    shards = {n: value for n, value in common.items() if n != "WORLD_SIZE"}
                    yield (
                        f"{prefix} signalled_gemm {name}",
                        partial(make, signalled_gemm_kernel, **shards, SHARDS=4),
                    )
        reduce = partial(
            compiled, reduce_received_kernel, architecture, dtype, Tile(),
            WORLD_SIZE=4, BLOCK_M=16, BLOCK_N=256,
        )  # fmt: skip
        yield f"{prefix} reduce_received {dtype}", reduce
    one_warp = partial(
        compiled, architecture=architecture, dtype="float32", tile=Tile(num_warps=1, num_stages=1)
    )
    yield f"{prefix} wait_sources", partial(one_warp, wait_sources_kernel)
    yield f"{prefix} rank_barrier", partial(one_warp, rank_barrier_kernel, WORLD_SIZE=4, BLOCK=256)


def scaled(architecture: int) -> Iterator[tuple[str, Callable[[], dict]]]:
    """FP8, by the tile of the fused strategy."""
    dtype = "float8_e4m3fn"
    problem = Problem(Pattern.AG_GEMM, 8192, 4096, 1024, dtype, 4, out_dtype="bfloat16")
    tile = fused.default_plan(problem).tile
    common = {**constants(tile, layout_nn=False), "SCALED": True}
    make = partial(compiled, architecture=architecture, dtype=dtype, tile=tile)
    ag = partial(make, ag_gemm_kernel, **common, HAS_BIAS=True)
    yield f"sm_{architecture} ag_gemm fp8 nt", ag
    yield f"sm_{architecture} gemm_rs fp8 nt", partial(make, gemm_rs_kernel, **common)


def main() -> None:
    work = {}
    for architecture in FP8_ARCHITECTURES:
        work |= dict(scaled(architecture))
    for architecture, dtypes in ARCHITECTURES.items():
        work |= dict(shipped(architecture, dtypes))
    tile = Tile(num_warps=4, num_stages=1)
    for name, (kernel, constexprs) in BROKEN.items():
        work[name] = partial(compiled, kernel, 90, "bfloat16", tile, **constexprs)
    write_ptx(work)


if __name__ == "__main__":
    main()
