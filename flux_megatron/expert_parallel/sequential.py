"""The plain strategy: one all-to-all and a GEMM an expert. Always possible; the baseline.

`all_to_all_single` needs its splits on the host, so each call waits for the counts of all ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from flux_megatron.expert_parallel.host_counts import all_counts
from flux_megatron.kernels.experts.weights import ExpertWeights
from flux_megatron.overlap import collectives
from flux_megatron.overlap.phase import phase
from flux_megatron.problem import Plan
from flux_megatron.symm.workspace import Workspace


def supports(x: Tensor, N: int, layout: str, space: Workspace) -> str | None:
    """Why this strategy cannot run the call: never."""
    return None


def default_plan(x: Tensor, N: int) -> Plan:
    return Plan("sequential")


def a2a_gemm(
    x: Tensor, w: ExpertWeights, counts: Tensor, capacity: int, layout: str, keep: bool, plan: Plan,
    space: Workspace,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """y [capacity, N], received counts [R, E], and the received rows if they are to be kept."""
    every = all_counts(counts, x.shape[0], capacity, space)
    rank = space.group.rank()
    came = every[:, rank]
    arrived = _exchanged(x, every[rank].sum(1), came.sum(1), space)
    pieces = arrived.split(came.flatten().tolist())  # by (source, expert)
    world_size, experts = came.shape
    rows = x.new_zeros(capacity, x.shape[1])
    by_expert = [pieces[s * experts + e] for e in range(experts) for s in range(world_size)]
    torch.cat(by_expert, out=rows[: len(arrived)])
    y = _multiplied(rows, w, came.sum(0).tolist(), layout)
    return y, came.to(counts.device), rows if keep else x.new_empty(0, x.shape[1])


def gemm_a2a(
    x: Tensor, w: ExpertWeights, counts: Tensor, tokens: int, layout: str, plan: Plan,
    space: Workspace,
) -> Tensor:  # fmt: skip
    """y [tokens, N], in the order in which the tokens were sent."""
    every = all_counts(counts, tokens, x.shape[0], space)
    rank = space.group.rank()
    came = every[:, rank]
    made = _multiplied(x, w, came.sum(0).tolist(), layout)[: int(came.sum())]
    pieces = made.split(came.t().flatten().tolist())  # by (expert, source)
    world_size, experts = came.shape
    back = torch.cat(
        [pieces[e * world_size + s] for s in range(world_size) for e in range(experts)]
    )
    return _exchanged(back, came.sum(1), every[rank].sum(1), space)


def _exchanged(rows: Tensor, sent: Tensor, came: Tensor, space: Workspace) -> Tensor:
    """What all ranks have sent here, in rank order; `sent` and `came` [R] are rows a rank."""
    arrived = rows.new_empty(int(came.sum()), rows.shape[1])
    with phase("all-to-all"):
        splits = came.tolist(), sent.tolist()
        collectives.run(space, dist.all_to_all_single, arrived, rows, *splits)
    return arrived


def _multiplied(rows: Tensor, w: ExpertWeights, sizes: list[int], layout: str) -> Tensor:
    """Each expert's rows times its matrix; 0 in the rows of no expert."""
    y = rows.new_zeros(len(rows), w.columns(layout))
    first = 0
    with phase("gemm chunk"):
        for expert, size in enumerate(sizes):
            part, matrix = slice(first, first + size), w.of(expert)
            torch.mm(rows[part], matrix.t() if layout == "nt" else matrix, out=y[part])
            first += size
    return y
