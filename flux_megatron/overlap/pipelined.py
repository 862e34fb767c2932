"""Chunks: the copy engine moves one while a library GEMM computes another. Our kernels only wait
and reduce.

AG+GEMM computes the local shard first, then the remote shards as they arrive. GEMM+RS computes the
remote shards first and the local shard last. With fewer splits the GEMMs are larger and the waits
longer: two in AG+GEMM are the local shard and all remote shards. One in GEMM+RS hides the pushes
behind later work, such as wgrad; one in AG+GEMM hides nothing, but reads the weight once, and the
copy engines gather without an SM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flux_megatron.kernels import launch
from flux_megatron.kernels.triton_launch import empty
from flux_megatron.overlap import transfer
from flux_megatron.overlap.phase import phase
from flux_megatron.patterns import COLUMN, ROW, Pattern
from flux_megatron.problem import Plan, Problem
from flux_megatron.symm.channel import Region
from flux_megatron.symm.copy_engine import Push
from flux_megatron.symm.recording import by_torch, lend
from flux_megatron.symm.signals import comm_rows_at_least, slot_bytes
from flux_megatron.symm.workspace import Workspace

PATTERNS = (COLUMN, ROW, Pattern.GEMM_AR)
NEEDS_SYMMETRIC_MEMORY = True
RECORDABLE = (COLUMN, ROW)


def supports(problem: Problem) -> str | None:
    """Why this strategy cannot run the problem, or None.

    Its waits and its reduction are our kernels, and every rank reduces equally many rows.
    """
    return transfer.unequal_shards(problem) or launch.supports(problem)


def default_plan(problem: Problem) -> Plan:
    return Plan("pipelined")


def candidates(problem: Problem) -> list[Plan]:
    """Plans worth measuring: one GEMM a shard, as few as overlap, or one."""
    fewer = [1]
    if problem.spec.gathers and problem.world_size > 2:
        fewer = [2, 1]
    return [default_plan(problem), *(Plan("pipelined", splits=splits) for splits in fewer)]


def start_gather(x: Tensor, plan: Plan, workspace: Workspace) -> transfer.Gather:
    """All-gather x [M_shard, K] in the background; `complete` gives [M, K]."""
    return transfer.start_gather(x, workspace, plan.comm_rows)


def ag_gemm(
    x: Tensor, w: Tensor, bias: Tensor | None, layout: str, plan: Plan, workspace: Workspace,
    consume: Callable[[Tensor], None] | None,
) -> Tensor:  # fmt: skip
    """all_gather(x) @ w + bias; `consume` is called with the gathered rows while they are valid."""
    whole = plan.splits == 1
    local_copy = "caller" if whole else "engine" if consume is not None else "nobody"
    gather = transfer.start_gather(x, workspace, plan.comm_rows, local_copy=local_copy)
    right = w.t() if layout == "nt" else w
    y = empty(x, len(gather.gathered), right.shape[1])
    if whole:
        _multiply(gather.complete(), right, out=y)
    else:
        _multiply_shards(gather, right, y, plan.splits)
    if bias is not None:
        by_torch(Tensor.add_, y, bias)
    if consume is not None:
        lend(consume, gather.gathered if whole else gather.complete())
    gather.close()
    return y


def _multiply_shards(gather: transfer.Gather, right: Tensor, y: Tensor, splits: int) -> None:
    """The local shard at once, the others when they have arrived."""
    rank, world_size, M_shard = gather.call.rank, gather.call.world_size, gather.x.shape[0]
    _multiply(gather.x, right, out=y[rank * M_shard : (rank + 1) * M_shard])
    for first, last in _runs(rank, world_size, splits):
        gather.wait_for(first, last - first)
        rows = slice(first * M_shard, last * M_shard)
        _multiply(gather.gathered[rows], right, out=y[rows])


def _multiply(x: Tensor, right: Tensor, *, out: Tensor) -> None:
    with phase("gemm chunk"):
        by_torch(_gemm, x, right, out)


def _gemm(x: Tensor, right: Tensor, out: Tensor) -> None:
    torch.mm(x, right, out=out)


def _runs(rank: int, world_size: int, splits: int) -> list[tuple[int, int]]:
    """First and last + 1 of the sources whose rows one GEMM takes, in order of arrival."""
    if splits:  # a GEMM takes contiguous rows: the shards after the local one, and those before it
        runs = [(rank + 1, world_size), (0, rank)]
        return [(first, last) for first, last in runs if first < last]
    sources = [(rank + step) % world_size for step in range(1, world_size)]
    return [(source, source + 1) for source in sources]


def start_gemm_rs(
    x: Tensor, w: Tensor, layout: str, plan: Plan, workspace: Workspace
) -> transfer.ReduceScatter:
    """x @ w chunk by chunk, each pushed to its owner; `finish` gives y [M_shard, N]."""
    engine = workspace.engine
    right = w.t() if layout == "nt" else w
    world_size, N = workspace.world_size, right.shape[1]
    M_shard = x.shape[0] // world_size
    comm_rows = comm_rows_at_least(M_shard, plan.comm_rows)
    size_bytes = x.shape[0] * N * x.element_size()
    call = transfer.begin(workspace, transfer.SCATTER, size_bytes)
    received, steps = _steps(call.region, M_shard, N, x.dtype, comm_rows)
    staging = empty(x, x.shape[0], N)
    source = staging.data_ptr()
    if plan.splits:
        _multiply(x, right, out=staging)
        # In this stream: a copy within one GPU needs SMs, and the reduction may hold all of them
        # before the copy engine's stream gets there. The driver's copy is the one that torch makes.
        local = received[call.rank]
        with phase("local shard"):
            engine.copy_here(local.data_ptr(), source + call.rank * local.nbytes, local.nbytes)
        engine.fork()
    for step in steps:
        if not plan.splits:
            rows = slice(step.first, step.last)
            out = staging[rows] if step.local is None else step.local
            _multiply(x[rows], right, out=out)
            engine.fork()
        with phase("scatter push"):
            if step.local is None:
                engine.send(step.pushes, source, call.epoch)  # signal [B]
            else:
                engine.signal(step.signal, call.epoch)  # signal [B]
    return transfer.ReduceScatter(workspace, call, received, comm_rows, keep_alive=staging)


class Step(NamedTuple):
    """A communication tile: rows of x, and where their products go: pushed from the same rows of
    the staging buffer, or `local`, into this rank's receive buffer. The `signal` is its address.
    """

    first: int
    last: int
    local: Tensor | None
    pushes: tuple[Push, ...]
    signal: int


def _steps(
    region: Region, M_shard: int, N: int, dtype: torch.dtype, comm_rows: int
) -> tuple[Tensor, tuple[Step, ...]]:
    """The receive buffer [R, M_shard, N], and the tiles for the rank behind this one first, for
    this one last.
    """
    shape, row_bytes = (region.world_size, M_shard, N), N * dtype.itemsize

    def step(owner: int, comm_tile: int, first: int) -> Step:
        signal = region.pad_addresses[owner] + slot_bytes(region.rank, comm_tile)
        begin, rows = owner * M_shard + first, min(comm_rows, M_shard - first)
        if owner == region.rank:
            local = region.view(owner, shape, dtype)[owner, first : first + rows]
            return Step(begin, begin + rows, local, (), signal)
        target = region.addresses[owner] + (region.rank * M_shard + first) * row_bytes
        push = Push(target, begin * row_bytes, rows * row_bytes, signal)
        return Step(begin, begin + rows, None, (push,), signal)

    owners = [(region.rank + hops) % region.world_size for hops in range(1, region.world_size + 1)]
    tiles = [*enumerate(range(0, M_shard, comm_rows))]
    steps = tuple(step(owner, *tile) for owner in owners for tile in tiles)
    return region.view(region.rank, shape, dtype), steps


def start_gemm_ar(
    x: Tensor, w: Tensor, layout: str, plan: Plan, workspace: Workspace
) -> transfer.AllReduce:
    """x @ w scattered as above, its sums gathered in the background; `finish` gives y [M, N]."""
    sums = start_gemm_rs(x, w, layout, plan, workspace).finish()
    return transfer.AllReduce(transfer.start_gather(sums, workspace, 0))
