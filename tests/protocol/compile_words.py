"""Compiles the kernels of few rows as `compile_kernels` does the others.

python compile_words.py FILE    writes JSON: name -> {"ptx": ..., "shared_bytes": ...}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from unittest import mock

import triton  # noqa: F401, before our kernels: see `compile_source`
from compile_kernels import compiled
from compile_source import write_ptx

from flux_megatron.kernels.few_rows import ag_gemv
from flux_megatron.kernels.few_rows.ag_gemv import ag_gemv_kernel
from flux_megatron.kernels.few_rows.gemv_ar import gemv_ar_kernel, sum_columns
from flux_megatron.overlap import low_latency, low_latency_plans
from flux_megatron.problem import Pattern, Problem

# dtype, layout, M, N, two phases: tiles of each kind, each number of values in a word, of phases;
# 4 rows: two ranks add up fewer words than a CTA has threads
SHIPPED = (
    ("bfloat16", "nt", 1, 4096, False),
    ("bfloat16", "nt", 4, 8192, False),
    ("bfloat16", "nt", 128, 2560, True),
    ("bfloat16", "nn", 64, 8192, True),
    ("bfloat16", "nn", 32, 16384, False),
    ("bfloat16", "nt", 64, 28672, False),
    ("bfloat16", "nn", 128, 8192, False),
    ("float16", "nt", 1, 8192, True),
    ("float32", "nt", 1, 8192, False),
)

ROWS_AS_THREADS = (128, 8192)


def shipped() -> Iterator[tuple[str, Callable[[], dict]]]:
    """Default plans for sm_90, and a tile with as many rows as threads."""
    for dtype, layout, M, N, two_phase in SHIPPED:
        problem = Problem(Pattern.GEMM_AR, M, N, 8192, dtype, 2, layout)
        plan = low_latency.default_plan(problem)
        tile, block_m, parts = plan.tile, max(16, M), plan.k_parts or 1
        if (M, N) == ROWS_AS_THREADS:
            tile = replace(tile, num_warps=M // 32)
        common = {
            "WORLD_SIZE": 2, "LAYOUT_NN": layout == "nn", "BLOCK_M": block_m,
            "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
            "VALUES": 1 if dtype == "float32" else 2, "NUM_WARPS": tile.num_warps,
            "TMA": tile.tma, "PARTS": parts,
        }  # fmt: skip
        name = f"{dtype} {layout} M={M} N={N}{' tma' * tile.tma}{' parts' * (parts > 1)}"
        reduces = partial(compiled, gemv_ar_kernel, 90, dtype, tile, **common)
        shard = max(1, M // 2)
        whole, half = (
            {"BLOCK_Y": rows, "SUM_N": sum_columns(tile, 2 * rows, common["VALUES"])}
            for rows in (block_m, shard)
        )
        yield f"gemv_ar {name}", partial(reduces, TWO_PHASE=two_phase, SCATTERS=False, **whole)
        yield f"gemv_rs {name}", partial(reduces, TWO_PHASE=False, SCATTERS=True, **half)
        gathers = partial(compiled, ag_gemv_kernel, 90, dtype, tile, **common)
        yield (
            f"ag_gemv {name}",
            partial(
                gathers, SHARD_ROWS=shard, HAS_BIAS=layout == "nn",
                PIECE_COLUMNS=ag_gemv.piece_columns(shard, 2, 8192, common["VALUES"]),
            ),
        )  # fmt: skip


if __name__ == "__main__":
    with mock.patch.object(low_latency_plans, "_on_hopper", return_value=True):
        write_ptx(dict(shipped()))
