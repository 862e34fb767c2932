"""Chunks: the copy engine moves one while the library's GEMM computes another. No kernel of ours
but the waits.

AG: own rows first, then each source's rows as they arrive. RS: the shards of others first, own
shard last.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flux_megatron.kernels import launch
from flux_megatron.overlap import transfer
from flux_megatron.problem import Plan, Problem
from flux_megatron.symm.copy_engine import copy_engine
from flux_megatron.symm.signals import comm_rows_at_least, slot
from flux_megatron.symm.workspace import Workspace


def supports(problem: Problem) -> str | None:
    """Why this strategy cannot run the problem, or None.

    Its waits and its reduction are kernels of ours.
    """
    return launch.supports(problem)


def default_plan(problem: Problem) -> Plan:
    return Plan("pipelined")


def start_gather(x: Tensor, plan: Plan, workspace: Workspace) -> transfer.Gather:
    """All-gather x [M_shard, K] in the background; `complete` gives [M, K]."""
    return transfer.start_gather(x, workspace, plan.comm_rows, own_rows=True)


def ag_gemm(
    x: Tensor, w: Tensor, bias: Tensor | None, layout: str, plan: Plan, workspace: Workspace,
    consume: Callable[[Tensor], None] | None,
) -> Tensor:  # fmt: skip
    """all_gather(x) @ w + bias; `consume` is called with the gathered rows while they are valid."""
    gather = transfer.start_gather(x, workspace, plan.comm_rows, own_rows=consume is not None)
    rank, world_size = gather.call.rank, gather.call.world_size
    right = w.t() if layout == "nt" else w
    y = x.new_empty(world_size * x.shape[0], right.shape[1])
    outputs, shards = y.chunk(world_size), gather.gathered.chunk(world_size)
    torch.mm(x, right, out=outputs[rank])
    for step in range(1, world_size):
        source = (rank + step) % world_size
        gather.wait_for(source)
        torch.mm(shards[source], right, out=outputs[source])
    if bias is not None:
        y += bias
    if consume is not None:
        consume(gather.complete())
    gather.close()
    return y


def start_gemm_rs(
    x: Tensor, w: Tensor, layout: str, plan: Plan, workspace: Workspace
) -> transfer.Scatter:
    """x @ w chunk by chunk, each pushed to its owner; `finish` gives y [M_shard, N]."""
    engine = copy_engine(x.device)
    right = w.t() if layout == "nt" else w
    world_size, N = workspace.group.size(), right.shape[1]
    M_shard = x.shape[0] // world_size
    comm_rows = comm_rows_at_least(M_shard, plan.comm_rows)
    shape = (world_size, M_shard, N)
    call = workspace.scatter.begin(world_size * M_shard * N * x.element_size())
    slots = call.view(call.rank, shape, x.dtype)
    staging = x.new_empty(shape)
    for step in range(1, world_size + 1):
        owner = (call.rank + step) % world_size
        rows = x[owner * M_shard : (owner + 1) * M_shard]
        target = call.view(owner, shape, x.dtype)[call.rank]
        for comm_tile, first in enumerate(range(0, M_shard, comm_rows)):
            part = slice(first, first + comm_rows)
            if owner == call.rank:
                torch.mm(rows[part], right, out=target[part])
                engine.fork()
            else:
                torch.mm(rows[part], right, out=staging[owner, part])
                engine.fork()
                engine.push(target[part], staging[owner, part])
            engine.signal(call.pads[owner], slot(call.rank, comm_tile), call.epoch)  # signal [B]
    return transfer.Scatter(workspace, call, slots, comm_rows, keep_alive=staging)
