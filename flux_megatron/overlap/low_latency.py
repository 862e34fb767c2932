"""Few rows, as in decoding: one kernel multiplies, sends, waits and adds up.

No copy engine, no signal and no barrier: every word of data carries the epoch of its call, so a
gather or a reduce-scatter costs one trip of the data, an all-reduce one or two. Eager and captured
calls are the same call.

    AG+GEMM           one kernel: store x at every rank | read the words of every rank, multiply
    GEMM+RS           one kernel: multiply, store parts at their owners | read those of all, add
    GEMM+AR           the same with parts at every rank; in two phases owners store sums once more
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from flux_megatron.kernels.few_rows import ag_gemv as ag_gemv_kernels
from flux_megatron.kernels.few_rows import gemv_ar as gemv_ar_kernels
from flux_megatron.kernels.sizes import parts_of
from flux_megatron.overlap import low_latency_plans, transfer
from flux_megatron.patterns import COLUMN, ROW, Pattern
from flux_megatron.problem import Problem
from flux_megatron.symm.program import Builder, CallProgram, ChannelSlots
from flux_megatron.symm.steps import Slot
from flux_megatron.symm.word_channel import WordChannel

MOST_ROWS, half_bytes = gemv_ar_kernels.MOST_ROWS, gemv_ar_kernels.half_bytes
NEEDS_SYMMETRIC_MEMORY = True
default_plan, candidates = low_latency_plans.default_plan, low_latency_plans.candidates
why_not = low_latency_plans.why_not


def supports(problem: Problem) -> str | None:
    """Why this strategy cannot run the problem, or None."""
    spec = problem.spec
    uneven = transfer.unequal_shards(problem) if spec.divided else None
    return uneven or gemv_ar_kernels.supports(problem)


def words_bytes(problem: Problem) -> int:
    """What one call stores on each rank."""
    dtype = getattr(torch, problem.dtype)
    if problem.spec.gathers:
        return ag_gemv_kernels.half_bytes(problem.M, problem.K, dtype)
    return half_bytes(problem.M, problem.N, dtype, problem.world_size)


def _ag_gemm(p: CallProgram) -> Slot:
    """In one kernel, which leaves the gathered rows too."""
    M_shard, K = p.x.shape
    gathered = p.x.new_empty(p.world_size * M_shard, K)
    channel = _words(p, ag_gemv_kernels.half_bytes(len(gathered), K, p.x.dtype))
    with p.phase("ag_gemv kernel"):
        y = ag_gemv_kernels.ag_gemv(
            p.x, gathered, p.w, p.bias, arrivals=channel.fixed("arrivals"), layout=p.layout,
            tile=p.plan.tile, parts=parts_of(p.plan.k_parts, p.N, p.plan.tile), **_given(channel),
        )  # fmt: skip
    p.caller_step(gathered)
    return y


def _reduced(p: CallProgram, scatters: bool) -> Slot:
    """In one kernel: when it is launched nothing is left to do."""
    channel = _words(p, half_bytes(len(p.x), p.N, p.x.dtype, p.world_size))
    with p.phase("gemv_ar kernel"):
        return gemv_ar_kernels.gemv_ar(
            p.x, p.w, world_size=p.world_size, layout=p.layout, tile=p.plan.tile,
            parts=parts_of(p.plan.k_parts, p.N, p.plan.tile), scatters=scatters,
            two_phase=p.plan.two_phase and not scatters, **_given(channel),
        )  # fmt: skip


def _words(p: CallProgram, size_bytes: int) -> ChannelSlots:
    return p.channel(transfer.WORDS, size_bytes, WordChannel)


def _given(channel: ChannelSlots) -> dict[str, Any]:
    """What every kernel needs of the words."""
    fixed = channel.fixed
    return {
        "word_pointers": fixed("pointers"), "half_words": channel.half_words,
        "epochs": fixed("epochs"), "work": fixed("work"), "counters": fixed("partial_counters"),
        "status": fixed("status"), "rank": channel.program.rank,
        "timeout_ns": channel.program.timeout_ns,
    }  # fmt: skip


BUILDERS: dict[Pattern, Builder] = {
    COLUMN: _ag_gemm,
    ROW: partial(_reduced, scatters=True),
    Pattern.GEMM_AR: partial(_reduced, scatters=False),
}
