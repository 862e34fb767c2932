"""Few rows, as in decoding: one kernel multiplies, sends, waits and adds up.

No copy engine, no signal and no barrier: every word of data carries the epoch of its call, so a
gather or a reduce-scatter costs one trip of the data, an all-reduce one or two. Eager and captured
calls are the same call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flux_megatron.kernels import ag_gemv as ag_gemv_kernels
from flux_megatron.kernels import gemv_ar as gemv_ar_kernels
from flux_megatron.kernels.sizes import parts_of
from flux_megatron.kernels.triton_launch import empty
from flux_megatron.overlap import low_latency_plans, transfer
from flux_megatron.overlap.phase import phase
from flux_megatron.patterns import COLUMN, ROW, Pattern
from flux_megatron.problem import Plan, Problem
from flux_megatron.symm.channel import Call
from flux_megatron.symm.recording import lend
from flux_megatron.symm.word_channel import WordChannel
from flux_megatron.symm.workspace import Workspace

PATTERNS = (COLUMN, ROW, Pattern.GEMM_AR)
MOST_ROWS, half_bytes = gemv_ar_kernels.MOST_ROWS, gemv_ar_kernels.half_bytes
NEEDS_SYMMETRIC_MEMORY = True
RECORDABLE, CHANNEL = PATTERNS, transfer.WORDS
default_plan, candidates = low_latency_plans.default_plan, low_latency_plans.candidates


def supports(problem: Problem) -> str | None:
    """Why this strategy cannot run the problem, or None."""
    spec = problem.spec
    uneven = transfer.unequal_shards(problem) if spec.gathers or spec.scatters else None
    return uneven or gemv_ar_kernels.supports(problem)


def words_bytes(problem: Problem) -> int:
    """What one call stores on each rank."""
    dtype = getattr(torch, problem.dtype)
    if problem.spec.gathers:
        return ag_gemv_kernels.half_bytes(problem.M, problem.K, dtype)
    return half_bytes(problem.M, problem.N, dtype, problem.world_size)


def start_gather(x: Tensor, plan: Plan, workspace: Workspace) -> transfer.Gather:
    """All-gather x [M_shard, K] by copy engine, beside a GEMM+RS; `complete` gives [M, K]."""
    return transfer.start_gather(x, workspace, plan.comm_rows)


def ag_gemm(
    x: Tensor, w: Tensor, bias: Tensor | None, layout: str, plan: Plan, workspace: Workspace,
    consume: Callable[[Tensor], None] | None,
) -> Tensor:  # fmt: skip
    """all_gather(x) @ w + bias in one kernel; `consume` is called with the gathered rows."""
    M_shard, K = x.shape
    N = w.shape[0] if layout == "nt" else w.shape[1]
    gathered = empty(x, workspace.world_size * M_shard, K)
    call, channel = _begin(workspace, ag_gemv_kernels.half_bytes(len(gathered), K, x.dtype))
    with phase("ag_gemv kernel"):
        y = ag_gemv_kernels.ag_gemv(
            x, gathered, w, bias, arrivals=channel.arrivals, layout=layout, tile=plan.tile,
            parts=parts_of(plan.splits, N, plan.tile), **_words(call, channel),
        )  # fmt: skip
    workspace.end(call)
    if consume is not None:
        lend(consume, gathered)
    return y


@dataclass(frozen=True)
class Reduction:
    """A sum over the ranks that its kernel has finished."""

    y: Tensor

    def finish(self) -> Tensor:
        """y [M, N], or this rank's rows of it."""
        return self.y


def start_gemm_rs(x: Tensor, w: Tensor, layout: str, plan: Plan, workspace: Workspace) -> Reduction:
    """reduce_scatter(x @ w) in one kernel; `finish` gives y [M / R, N]."""
    return _reduced(x, w, layout, plan, workspace, scatters=True)


def start_gemm_ar(x: Tensor, w: Tensor, layout: str, plan: Plan, workspace: Workspace) -> Reduction:
    """all_reduce(x @ w) in one kernel; `finish` gives y [M, N]."""
    return _reduced(x, w, layout, plan, workspace, scatters=False)


def _reduced(
    x: Tensor, w: Tensor, layout: str, plan: Plan, workspace: Workspace, scatters: bool
) -> Reduction:
    N = w.shape[0] if layout == "nt" else w.shape[1]
    call, channel = _begin(workspace, half_bytes(x.shape[0], N, x.dtype, workspace.world_size))
    with phase("gemv_ar kernel"):
        y = gemv_ar_kernels.gemv_ar(
            x, w, world_size=call.world_size, layout=layout, tile=plan.tile,
            parts=parts_of(plan.splits, N, plan.tile), scatters=scatters,
            two_phase=plan.two_phase and not scatters, **_words(call, channel),
        )  # fmt: skip
    workspace.end(call)
    return Reduction(y)


def _begin(workspace: Workspace, size_bytes: int) -> tuple[Call, WordChannel]:
    call = transfer.begin(workspace, transfer.WORDS, size_bytes, WordChannel)
    channel = call.channel
    assert isinstance(channel, WordChannel), f"{type(channel)} given, a WordChannel expected"
    return call, channel


def _words(call: Call, channel: WordChannel) -> dict[str, Any]:
    """What every kernel needs of the words."""
    return {
        "word_pointers": call.pointers, "half_bytes": channel.region_bytes,
        "epochs": channel.epochs, "work": channel.work, "counters": channel.partial_counters,
        "status": call.status, "rank": call.rank, "timeout_ns": call.timeout_ns,
    }  # fmt: skip
