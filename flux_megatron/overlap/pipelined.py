"""Chunks: the copy engine moves one while a library GEMM computes another. Our kernels only wait
and reduce.

AG+GEMM computes the local shard first, then the remote shards as they arrive. GEMM+RS computes the
remote shards first and the local shard last. With fewer GEMMs they are larger and the waits longer:
two in AG+GEMM are the local shard and all remote shards. One in GEMM+RS hides the pushes
behind later work, such as wgrad; one in AG+GEMM hides nothing, but reads the weight once, and the
copy engines gather without an SM.

    AG+GEMM, rank r
    caller's stream   GEMM of local rows | wait [A] of r+1, GEMM | wait [A] of r+2, GEMM | ...
    copy engine       x to r-1, signal [A] | x to r-2, signal [A] | ...

    GEMM+RS, rank r
    caller's stream   GEMM for r+1 | GEMM for r+2 | ... | GEMM for r | wait [B] of all, sum
    copy engine                      sums to r+1, signal [B] | to r+2, signal [B] | ...

FP8 is the library's GEMM too. Blockwise scales of x travel with its rows, a matrix a rank; those of
a chunk of rows have gaps in that, so a GEMM of one gets a copy, 1/32 of its rows' bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flux_megatron.kernels import launch
from flux_megatron.overlap import library_gemm, transfer
from flux_megatron.overlap.gather import Gather, add_gather, all_reduced
from flux_megatron.patterns import COLUMN, ROW, Pattern
from flux_megatron.problem import Plan, Problem
from flux_megatron.scaling import result_dtype
from flux_megatron.symm.program import Builder, CallProgram
from flux_megatron.symm.signals import comm_rows_at_least
from flux_megatron.symm.steps import Slot

NEEDS_SYMMETRIC_MEMORY = True


def supports(problem: Problem) -> str | None:
    """Why this strategy cannot run the problem, or None.

    Its waits and its reduction are our kernels, and every rank reduces equally many rows.
    """
    return transfer.unequal_shards(problem) or _by_library(problem)


def _by_library(problem: Problem) -> str | None:
    if problem.blockwise:
        device = torch.device(problem.device)
        refused = library_gemm.blocks_refused(device, problem.M_shard, problem.K_local)
        return refused or launch.supports_tensors(problem.out_dtype, problem.device)
    return launch.supports_scaled(problem)


def default_plan(problem: Problem) -> Plan:
    return Plan("pipelined")


def why_not(problem: Problem, plan: Plan) -> str | None:
    """None: every number of GEMMs is possible."""
    return None


def candidates(problem: Problem) -> list[Plan]:
    """Plans worth measuring: one GEMM a shard, as few as overlap, or one."""
    fewer = [2, 1] if problem.spec.gathers and problem.world_size > 2 else [1]
    return [default_plan(problem), *(Plan("pipelined", gemms=gemms) for gemms in fewer)]


def _ag_gemm(p: CallProgram) -> Slot:
    whole, borrows = p.plan.gemms == 1, p.caller_steps
    local_copy = "caller" if whole else "engine" if borrows else "nobody"
    scales: Any = p.scaling.x if p.scaling and p.scaling.blockwise else None
    gather = add_gather(p, p.x, p.plan.comm_rows, local_copy=local_copy, scales=scales)
    library_gemm.transpose(p)
    y = p.x.new_empty(len(gather.gathered), p.N, dtype=result_dtype(p.x, p.scaling))
    if whole:
        rows, scales = gather.complete(), gather.scales_of(0, p.world_size)
        library_gemm.multiply(p, rows, out=y, bias=p.bias, x_scale=scales)
    else:
        _multiply_shards(p, gather, y)
    if p.bias is not None and p.scaling is None:
        p.torch(Tensor.add_, y, p.bias)
    if borrows:
        p.caller_step(gather.gathered if whole else gather.complete())
    gather.close()
    return y


def _multiply_shards(p: CallProgram, gather: Gather, y: Slot) -> None:
    """The local shard at once, the others when they have arrived."""
    rank, M_shard = p.rank, len(p.x)
    library_gemm.multiply(p, p.x, out=y[rank * M_shard : (rank + 1) * M_shard], bias=p.bias)
    for first, last in _runs(rank, p.world_size, p.plan.gemms):
        gather.wait_for(first, last - first)
        rows = slice(first * M_shard, last * M_shard)
        scales = gather.scales_of(first, last)
        library_gemm.multiply(p, gather.gathered[rows], out=y[rows], bias=p.bias, x_scale=scales)


def _runs(rank: int, world_size: int, gemms: int) -> list[tuple[int, int]]:
    """First and last + 1 of the sources whose rows one GEMM takes, in order of arrival."""
    if gemms:  # a GEMM takes contiguous rows: the shards after the local one, and those before it
        runs = [(rank + 1, world_size), (0, rank)]
        return [(first, last) for first, last in runs if first < last]
    sources = [(rank + step) % world_size for step in range(1, world_size)]
    return [(source, source + 1) for source in sources]


def _sums(p: CallProgram) -> transfer.ReduceScatter:
    """x @ w chunk by chunk, each pushed to its owner."""
    rank, world_size, M_shard = p.rank, p.world_size, len(p.x) // p.world_size
    comm_rows = p.plan.comm_rows
    if p.plan.gemms:
        comm_rows = transfer.tile_rows(p, M_shard, comm_rows)
    comm_rows = comm_rows_at_least(M_shard, comm_rows)
    dtype = result_dtype(p.x, p.scaling)
    library_gemm.transpose(p)
    channel = p.channel(transfer.SCATTER, len(p.x) * p.N * dtype.itemsize)
    received = channel.region((world_size * M_shard, p.N), dtype)
    staging = p.x.new_empty(len(p.x), p.N, dtype=dtype)
    own = slice(rank * M_shard, (rank + 1) * M_shard)
    if p.plan.gemms:
        library_gemm.multiply(p, p.x, out=staging)
        # In this stream: a copy within one GPU needs SMs, and the reduction may hold all of them
        # before the copy engine's stream gets there. The driver's copy is the one that torch makes.
        with p.phase("local shard"):
            p.copy(received[own].operand, staging[own], "copy_here")
        p.move("fork")
    # tiles for the rank behind this one first, for this one last
    for owner in ((rank + hops) % world_size for hops in range(1, world_size + 1)):
        for comm_tile, first in enumerate(range(0, M_shard, comm_rows)):
            tile = slice(first, min(first + comm_rows, M_shard))
            rows = slice(owner * M_shard + tile.start, owner * M_shard + tile.stop)
            if not p.plan.gemms:
                out = received[own][tile] if owner == rank else staging[rows]
                library_gemm.multiply(p, p.x[rows], out=out, rows=rows)
                p.move("fork")
            with p.phase("scatter push"):
                if owner != rank:
                    to = channel.peer(owner, received[own][tile].operand.add)
                    p.copy(to, staging[rows])
                p.move(
                    "signal", channel.signal(owner, rank, comm_tile), channel.epoch
                )  # signal [B]
    blocks = channel.region((world_size, M_shard, p.N), dtype)
    return transfer.ReduceScatter(channel, blocks, comm_rows, staging)


def _gemm_rs(p: CallProgram) -> Slot:
    sums = _sums(p)
    p.caller_step()
    return sums.finish()


def _gemm_ar(p: CallProgram) -> Slot:
    return all_reduced(p, _sums(p).finish())


BUILDERS: dict[Pattern, Builder] = {COLUMN: _ag_gemm, ROW: _gemm_rs, Pattern.GEMM_AR: _gemm_ar}
