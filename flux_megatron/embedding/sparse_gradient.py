"""The gradient of embedding tables as a sparse tensor, as `torch.nn.EmbeddingBag(sparse=True)` has
it: a value for each entry of a bag, not summed over equal rows. So the host knows its size, and a
table without entries costs nothing.

Gradients travel by one all-to-all under every strategy: there is no sort to hide it behind.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flux_megatron.embedding.bags import Bags, bags_of_entries, outside
from flux_megatron.embedding.sequential_bags import exchanged
from flux_megatron.symm.workspace import Workspace


def values(dy: Tensor, indices: Tensor, offsets: Tensor, bags: Bags, space: Workspace) -> Tensor:
    """dy [B / R, T, D]  ->  of each entry what it adds to its row, [nnz, D]."""
    gradients = exchanged(dy, bags, space).transpose(0, 1).flatten(0, 1)
    lengths, bag = bags_of_entries(indices, offsets)
    found = gradients.index_select(0, bag)
    if bags.mode == "mean":
        found /= lengths[bag][:, None]
    return found.masked_fill_(outside(indices, bags.rows)[:, None], 0)


def as_tensor(values: Tensor, indices: Tensor, offsets: Tensor, local: int, rows: int) -> Tensor:
    """The values as a sparse tensor [T_local, rows, D], not coalesced. An index outside its
    table, whose value is zero, becomes one inside.
    """
    lengths, bag = bags_of_entries(indices, offsets)
    table = bag // (lengths.numel() // local)
    return torch.sparse_coo_tensor(
        torch.stack([table, indices.clamp(0, rows - 1)]), values, (local, rows, values.shape[1]),
        check_invariants=False,
    )  # fmt: skip
