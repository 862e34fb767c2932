"""Compiles kernels for GPUs that are not there, in a process of its own without the interpreter.

    python compile_kernels.py FILE    writes JSON: name -> {"ptx": ..., "shared_bytes": ...}

Compiled are all kernels in all configurations that the strategies ship, for sm_80 and sm_90, and
those of one type for sm_100.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from unittest import mock

import torch
from compile_source import call_of, codes_of, codes_of_plan, memory, write_ptx

from flux_megatron.kernels.portable.gathered_gemm import gathered_gemm
from flux_megatron.kernels.portable.signalled_gemm import signalled_gemm
from flux_megatron.kernels.portable.wait_sources import wait_sources
from flux_megatron.kernels.rank_barrier import rank_barrier
from flux_megatron.kernels.triton_launch import Code
from flux_megatron.overlap import fused
from flux_megatron.problem import Pattern, Plan, Problem, Tile

_WIDE = ("float32", "bfloat16", "float16")
ARCHITECTURES = {80: _WIDE, 90: _WIDE, 100: ("bfloat16",)}
FP8_ARCHITECTURES = (89, 90)
WORLD_SIZE = 4
GATHER = Problem(Pattern.AG_GEMM, 8192, 4096, 1024, "bfloat16", WORLD_SIZE)
SCATTER = replace(GATHER, pattern=Pattern.GEMM_RS, K=4096)


def shipped_tiles(dtype: str) -> set[Tile]:
    """Every tile that the fused strategy chooses; those with TMA also without, for odd views."""
    tiles = {
        fused.default_plan(replace(GATHER, M=M, N=N, dtype=dtype)).tile
        for M in (128, 8192)  # shards of few and of many rows
        for N in (4096, 4 * 1001)  # 16-byte rows or not
    }
    return tiles | {replace(tile, tma=False) for tile in tiles}


def shipped(architecture: int, dtypes: Iterable[str]) -> Iterator[tuple[str, Code]]:
    capability = divmod(architecture, 10)
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
        for dtype in dtypes:
            for tile, layout in product(shipped_tiles(dtype), ("nt", "nn")):
                shape = f"{tile.block_m}x{tile.block_n}x{tile.block_k}"
                for code in _of_tile(tile, dtype, layout):
                    name = code.kernel.removesuffix("_kernel") + f" {dtype}"
                    if not name.startswith("reduce_received"):
                        name += f" {shape}{' tma' * tile.tma} {layout}"
                    yield f"sm_{architecture} {name}", code
    waits = partial(
        wait_sources, pad=memory(1), status=memory(1), first_source=0, count=1,
        world_size=WORLD_SIZE, epoch=1, timeout_ns=1, M_shard=1, comm_rows=1,
    )  # fmt: skip
    yield f"sm_{architecture} wait_sources", *codes_of(waits)
    barrier = partial(rank_barrier, call_of(WORLD_SIZE))
    yield f"sm_{architecture} rank_barrier", *codes_of(barrier)


def _of_tile(tile: Tile, dtype: str, layout: str) -> Iterator[Code]:
    for problem in (GATHER, SCATTER):
        problem = replace(problem, dtype=dtype, layout=layout)
        # with a bias in one layout only: it does not touch the order of anything
        yield from codes_of_plan(problem, Plan("fused", tile=tile), biased=layout == "nn")
    if dtype == "bfloat16" and layout == "nt":  # else they differ from the two in nothing
        x, words = memory(8192, 1024, dtype=torch.bfloat16), memory(1)
        yield from codes_of(
            partial(
                gathered_gemm, x[:2048], x, x[:4096], None, x, table=words, words=words, rank=0,
                bands=4, step_us=1, spare_sms=8, layout=layout, tile=tile,
            )
        )  # fmt: skip
        yield from codes_of(
            partial(
                signalled_gemm, x, x[:4096], x, table=words, tiles=1024, shards=WORLD_SIZE,
                counters=words, work_counter=words, spare_sms=8, layout=layout, tile=tile,
            )
        )  # fmt: skip


def scaled(architecture: int) -> Iterator[tuple[str, Code]]:
    """FP8, by the tile of the fused strategy."""
    for problem in (GATHER, SCATTER):
        problem = replace(problem, dtype="float8_e4m3fn", out_dtype="bfloat16")
        code = next(codes_of_plan(problem, fused.default_plan(problem), biased=True))
        yield f"sm_{architecture} {problem.pattern} fp8 nt", code


def main() -> None:
    found = {}
    for architecture in FP8_ARCHITECTURES:
        found |= {name: (code, architecture) for name, code in scaled(architecture)}
    for architecture, dtypes in ARCHITECTURES.items():
        found |= {name: (code, architecture) for name, code in shipped(architecture, dtypes)}
    write_ptx(found)


if __name__ == "__main__":
    main()
