"""Compiles Hopper kernels ahead of their calls; nothing runs.

Of a version of Triton that nobody has run it is asked whether it can: three kernels together use
all that the others do, and a call that has begun cannot change its strategy any more. And before a
race the kernels of its plans are compiled, so that their first calls only load them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flux_megatron.kernels import hopper_ag_gemm, hopper_gemm_rs, hopper_signalled_gemm
from flux_megatron.kernels.hopper_config import TILE
from flux_megatron.kernels.hopper_gathered_sums import Gathering
from flux_megatron.kernels.triton_launch import compiling_only
from flux_megatron.problem import Plan, Problem, Tile
from flux_megatron.symm.signals import PARTIAL_COUNTERS, WORK_WORDS

ROWS, N, K = 512, 512, 1024  # whole tiles of two ranks


def compile_kernels(device: str = "cuda") -> None:
    """Raises what Triton raises."""
    x = torch.empty(ROWS, K, dtype=torch.bfloat16, device=device)
    w, out = x.new_empty(N, K), x.new_empty(2 * ROWS, N)
    words = torch.zeros(PARTIAL_COUNTERS + WORK_WORDS, dtype=torch.int32, device=device)
    with compiling_only():
        hopper_ag_gemm.gemm(x, w, "nt")
        hopper_signalled_gemm.signalled_gemm(
            x, w, out, table=words, tiles=8, shards=2, counters=words, work_counter=words,
            spare_sms=0, layout="nt", tile=TILE,
        )  # fmt: skip
        for by_sm in (False, True):
            _scatter(x, w, words, 2, "nt", TILE, by_sm)


def compile_for(problem: Problem, plan: Plan, device: torch.device) -> None:
    """The kernel of a call without a bias; of a backward the one that lends its rows."""
    # of how many parts a local tile of GEMM+RS is depends on K
    rows, nt, K = problem.world_size * ROWS, problem.layout == "nt", problem.K_local
    x = torch.empty(rows, K, dtype=getattr(torch, problem.dtype), device=device)
    w = x.new_empty(N, K) if nt else x.new_empty(K, N)
    words = torch.zeros(PARTIAL_COUNTERS + WORK_WORDS, dtype=torch.int32, device=device)
    with compiling_only():
        if not problem.spec.gathers:
            by_sm = plan.transport == "sm"
            gathers = not problem.spec.scatters
            _scatter(x, w, words, problem.world_size, problem.layout, plan.tile, by_sm, gathers)
            return
        hopper_ag_gemm.ag_gemm(
            x[:ROWS], x, w, None, pad=words, status=words, partial_counters=words, work_words=words,
            rank=0, epoch=1, timeout_ns=10**9, comm_rows=ROWS, layout=problem.layout,
            tile=plan.tile, copy_local=problem.is_backward, k_parts=max(1, plan.splits),
        )  # fmt: skip


def _scatter(
    x: Tensor, w: Tensor, words: Tensor, world_size: int, layout: str, tile: Tile, by_sm: bool,
    gathers: bool = False,
) -> None:  # fmt: skip
    out = x.new_empty(len(x) * N // tile.block_n, tile.block_n)
    pointers = torch.zeros(world_size, dtype=torch.int64, device=x.device)
    gathering = Gathering(
        x.new_empty(len(x), N), x.new_empty(len(x), N), pointers, pointers, words, 1, words
    )
    hopper_gemm_rs.gemm_rs(
        x, w, parts=out, received=out, received_pointers=pointers, pad_pointers=pointers, pad=words,
        status=words, counters=words, partial_counters=words, work_words=words, rank=0,
        world_size=world_size, epoch=1, timeout_ns=10**9, tiles_comm=1, layout=layout, tile=tile,
        by_sm=by_sm,
        gathering=gathering if gathers else None,
    )  # fmt: skip
