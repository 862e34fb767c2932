"""One library call for all tables of a rank, one collective: the fallback and the baseline.

`F.embedding_bag` takes the tables as one, as table-batched lookups do; then an all-to-all. Backward
is the reverse.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from flux_megatron.embedding.bags import MODES, Bags, bags_of_entries, outside
from flux_megatron.overlap import collectives
from flux_megatron.overlap.phase import phase
from flux_megatron.symm.workspace import Workspace


def as_one_table(indices: Tensor, offsets: Tensor, bags: Bags) -> Tensor:
    """indices [nnz] as rows of [T_local * rows, D]."""
    counts = offsets[:: bags.batch].diff()
    first_rows = torch.arange(bags.local, device=indices.device) * bags.rows
    return indices + torch.repeat_interleave(first_rows, counts, output_size=indices.numel())


def forward(
    weight: Tensor, indices: Tensor, offsets: Tensor, bags: Bags, space: Workspace
) -> Tensor:
    """weight [T_local, rows, D]  ->  [B / R, T, D]."""
    with phase("pool"):
        rows = as_one_table(indices, offsets, bags)
        pooled = F.embedding_bag(
            rows, weight.flatten(0, 1), offsets, mode=bags.mode, include_last_offset=True
        ).view(bags.local, bags.batch, bags.D)
        outgoing = pooled.transpose(0, 1).contiguous()  # destinations one behind the other
    incoming = [outgoing.new_empty(bags.samples, n, bags.D) for n in bags.tables]
    with phase("all-to-all"):
        _exchange(incoming, [*outgoing.chunk(bags.world_size)], space)
    return torch.cat(incoming, 1)


def backward(dy: Tensor, indices: Tensor, offsets: Tensor, bags: Bags, space: Workspace) -> Tensor:
    """dy [B / R, T, D]  ->  dw [T_local, rows, D]."""
    gradients = exchanged(dy, bags, space)
    with phase("gradient of rows"):
        lengths, bag_of_entry = bags_of_entries(indices, offsets)
        table_rows = bags.local * bags.rows
        rows = as_one_table(indices, offsets, bags)
        rows.masked_fill_(outside(indices, bags.rows), table_rows)  # a row that nobody reads
        dw = torch.ops.aten._embedding_bag_dense_backward(
            gradients.transpose(0, 1).flatten(0, 1), rows, bag_of_entry, lengths, lengths,
            table_rows + 1, False, MODES.index(bags.mode), None,
        )[:-1]  # fmt: skip
    return dw.view(bags.local, bags.rows, bags.D)


def exchanged(dy: Tensor, bags: Bags, space: Workspace) -> Tensor:
    """dy [B / R, T, D]  ->  the gradients of this rank's bags, [B, T_local, D]."""
    outgoing = [dy[:, bags.columns(rank)].contiguous() for rank in range(bags.world_size)]
    gradients = dy.new_empty(bags.batch, bags.local, bags.D)
    with phase("all-to-all"):
        _exchange([*gradients.chunk(bags.world_size)], outgoing, space)
    return gradients


def _exchange(incoming: list[Tensor], outgoing: list[Tensor], space: Workspace) -> None:
    """Rank r's `outgoing[s]` becomes rank s's `incoming[r]`; all are contiguous."""
    received = outgoing[0].new_empty(sum(one.numel() for one in incoming))
    sizes = [[one.numel() for one in blocks] for blocks in (incoming, outgoing)]
    sent = torch.cat([one.flatten() for one in outgoing])
    collectives.run(space, dist.all_to_all_single, received, sent, *sizes)
    for one, block in zip(incoming, received.split([one.numel() for one in incoming]), strict=True):
        one.copy_(block.view_as(one))
