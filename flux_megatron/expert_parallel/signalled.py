"""Bands of experts: a grouped GEMM counts its tiles, and plain all-to-alls of bands run beside it.

It needs neither peer access nor one node, but counts on the host: each call waits for them, as
`sequential` does. `gemm_a2a` sends a band when its tiles are counted; in `a2a_gemm` the GEMM of a
band waits for its rows. This rank's own rows do not travel, and hide the last or the first band.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flux_megatron.expert_parallel import fused
from flux_megatron.expert_parallel.bands import Order, Pieces, order_of
from flux_megatron.expert_parallel.host_counts import all_counts
from flux_megatron.kernels import launch
from flux_megatron.kernels.experts.signalled import signalled_experts
from flux_megatron.kernels.experts.weights import ExpertWeights
from flux_megatron.kernels.sizes import cdiv
from flux_megatron.overlap import collectives
from flux_megatron.overlap.phase import phase
from flux_megatron.overlap.stage import Stage, communicator, join, stage_of
from flux_megatron.problem import Plan
from flux_megatron.symm.workspace import Workspace

BANDS = 4
# SMs that the GEMM leaves to NCCL: with 8 fine-grained experts took 16 to 49 % longer, Mixtral-like
# ones at most 4 % (2 x H200, 2026-11-23, h200x2/signalled_experts.jsonl).
COMM_SMS = 16


def supports(x: Tensor, N: int, layout: str, space: Workspace) -> str | None:
    """Why this strategy cannot run the call, or None."""
    return launch.supports_tensors(x.dtype, x.device.type)


def default_plan(x: Tensor, N: int) -> Plan:
    tile = fused.default_plan(x, N).tile
    return Plan("signalled", tile=tile, bands=BANDS, comm_sms=COMM_SMS)


def gemm_a2a(
    x: Tensor, w: ExpertWeights, counts: Tensor, tokens: int, layout: str, plan: Plan,
    space: Workspace,
) -> Tensor:  # fmt: skip
    """y [tokens, N], in the order in which the tokens were sent."""
    every = all_counts(counts, tokens, x.shape[0], space)
    call = _begin(every, w, layout, plan, space)
    y, far = x.new_empty(tokens, call.N), x.new_empty(call.came, call.N)
    order, stage = call.order, call.stage
    stage.stream.fork()  # as below: a band of nothing here waits for no tile
    call.multiply(x, far, y, 0, order.near_first + order.near_tile_rows, back=True)
    with stage.stream.stream():
        for number, band in enumerate(order.bands):
            tiles = band.tile_rows * cdiv(call.N, plan.tile.block_n)
            stage.stream.wait_count(stage.count_of(number), tiles)  # wait [D]
            exchange(call.group, _rows(y, band.tokens), _rows(far, band.far), space)
            stage.stream.write(stage.count_of(number), 0)  # for the next call
    join(space)
    return y


def a2a_gemm(
    x: Tensor, w: ExpertWeights, counts: Tensor, capacity: int, layout: str, keep: bool, plan: Plan,
    space: Workspace,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """y [capacity, N], received counts [R, E], and the received rows if they are to be kept."""
    every = all_counts(counts, x.shape[0], capacity, space)
    call = _begin(every, w, layout, plan, space)
    y, far = x.new_empty(capacity, call.N), x.new_empty(call.came, x.shape[1])
    order, stream = call.order, call.stage.stream
    stream.fork()  # where torch is deterministic it fills new memory, here and not in that stream
    stretches = [(order.near_first, order.near_tile_rows), *(band[:2] for band in order.bands)]
    for number, stretch in enumerate(stretches):
        # a band travels beside the GEMM of what is here: enqueued in this order, because with
        # CUDA_DEVICE_MAX_CONNECTIONS=1 the GEMM would stand behind all bands
        for band in order.bands[number : number + 1]:
            with stream.stream():
                exchange(call.group, _rows(far, band.far), _rows(x, band.tokens), space)
        call.multiply(y, far, x, *stretch, back=False)
        stream.join()  # the next GEMM comes after what has travelled so far
    y[call.came :] = 0
    join(space)
    came = every[:, space.group.rank()]
    rows = (
        _sorted(x, far, every, space.group.rank(), capacity) if keep else x.new_empty(0, x.shape[1])
    )
    return y, came.to(counts.device), rows


class _Call(NamedTuple):
    """A call that has begun: what its GEMMs and all-to-alls have in common."""

    order: Order
    stage: Stage
    group: Any
    w: ExpertWeights
    layout: str
    plan: Plan
    came: int

    @property
    def N(self) -> int:
        return self.w.columns(self.layout)

    def multiply(
        self, home: Tensor, far: Tensor, near: Tensor, first: int, tile_rows: int, *, back: bool
    ) -> None:
        """The GEMM of so many rows of tiles."""
        with phase("signalled_experts kernel"):
            signalled_experts(
                home, far, near, self.w, self.order.table, far_groups=self.order.far_groups,
                first=first, tile_rows=tile_rows, counters=self.stage.counters,
                work_counter=self.stage.work_counter, spare_sms=self.plan.comm_sms, back=back,
                layout=self.layout, tile=self.plan.tile,
            )  # fmt: skip


def _begin(every: Tensor, w: ExpertWeights, layout: str, plan: Plan, space: Workspace) -> _Call:
    stage, group = stage_of(space), communicator(space, plan.comm_sms)
    rank = space.group.rank()
    numbers = tuple(every.flatten().tolist())
    order = order_of(numbers, len(every), rank, plan.bands, plan.tile.block_m, space.device)
    space.engine.follow()
    stage.begin(order)  # the host has waited for all that x comes from
    return _Call(order, stage, group, w, layout, plan, int(every[:, rank].sum()))


def _rows(tensor: Tensor, pieces: Pieces) -> list[Tensor]:
    return [tensor[first:last] for first, last in pieces]


def exchange(group: Any, received: list[Tensor], sent: list[Tensor], space: Workspace) -> None:
    """An all-to-all of pieces, one for each rank, in the current stream; gloo has none before torch
    2.13, but sends them one by one.
    """
    with phase("all-to-all"):
        if received[0].device.type == "cuda":
            group.alltoall(received, sent).wait()
            return
        works = [group.recv([piece], r, 0) for r, piece in enumerate(received) if len(piece)]
        works += [group.send([piece], r, 0) for r, piece in enumerate(sent) if len(piece)]
        for work in works:
            collectives.wait(work, space)


def _sorted(x: Tensor, far: Tensor, every: Tensor, rank: int, capacity: int) -> Tensor:
    """[capacity, K]: the rows that came, those of this rank among them, by (expert, source)."""
    came = every[:, rank]
    pieces = list(far.split(came.flatten().tolist()))  # by (source, expert)
    ranks, experts = came.shape
    own = x.split(every[rank].flatten().tolist())[rank * experts : (rank + 1) * experts]
    pieces[rank * experts : (rank + 1) * experts] = own
    rows = x.new_zeros(capacity, x.shape[1])
    by_expert = [pieces[s * experts + e] for e in range(experts) for s in range(ranks)]
    torch.cat(by_expert, out=rows[: len(far)])
    return rows
