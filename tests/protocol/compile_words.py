"""Compiles the kernels of few rows as `compile_kernels` does the others.

python compile_words.py FILE    writes JSON: name -> {"ptx": ..., "shared_bytes": ...}
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import torch
from compile_source import codes_of_plan, write_ptx

from flux_megatron.kernels.triton_launch import Code
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
KINDS = {Pattern.GEMM_AR: "gemv_ar", Pattern.GEMM_RS: "gemv_rs", Pattern.AG_GEMM: "ag_gemv"}


def shipped() -> Iterator[tuple[str, Code]]:
    """Default plans for sm_90, and a tile with as many rows as threads."""
    for dtype, layout, M, N, two_phase in SHIPPED:
        problem = Problem(Pattern.GEMM_AR, M, N, 8192, dtype, 2, layout)
        plan = replace(low_latency.default_plan(problem), two_phase=two_phase)
        if (M, N) == ROWS_AS_THREADS:
            plan = replace(plan, tile=replace(plan.tile, num_warps=M // 32))
        more = " tma" * plan.tile.tma + " parts" * (plan.k_parts > 1)
        for pattern, kind in KINDS.items():
            one = problem if pattern is Pattern.GEMM_AR else replace(problem, M=max(2, M))
            (code,) = codes_of_plan(replace(one, pattern=pattern), plan, biased=layout == "nn")
            yield f"{kind} {dtype} {layout} M={M} N={N}{more}", code


if __name__ == "__main__":
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(low_latency_plans, "_on_hopper", return_value=True),
    ):
        write_ptx({name: (code, 90) for name, code in shipped()})
