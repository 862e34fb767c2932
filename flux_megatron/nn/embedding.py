"""Embedding bags whose tables are divided over a process group, whole tables to each rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter

from flux_megatron import ops
from flux_megatron.embedding.operation import embedding_all_to_all
from flux_megatron.nn.replicated import joined


class ShardedEmbeddingBag(Module):
    """`num_tables` tables of [rows, D], each on one rank; the first ranks have one more if need be.

    A call takes the bags of this rank's tables, for the samples of all ranks, and gives this rank's
    samples of all tables: [B / R, num_tables, D]. With `sparse` the weight's gradient is a sparse
    tensor, for `torch.optim.SGD` and `SparseAdam`. `embedding_all_to_all` says more.
    """

    def __init__(
        self, num_tables: int, rows: int, D: int, *, mode: str = "sum", strategy: str = "auto",
        validate: bool = True, sparse: bool = False, group: ProcessGroup | None = None,
        device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        group = joined(group, type(self).__name__)
        self.group_name, world_size, rank = ops.name_of(group), group.size(), group.rank()
        if num_tables < world_size:
            raise ValueError(
                f"{num_tables} tables given, at least one for each of {world_size} ranks expected"
            )
        each, more = divmod(num_tables, world_size)
        self.tables = tuple(each + (r < more) for r in range(world_size))
        first = sum(self.tables[:rank])
        self.own_tables = slice(first, first + self.tables[rank])
        self.mode, self.strategy, self.validate, self.sparse = mode, strategy, validate, sparse
        self.weight = Parameter(torch.empty(self.tables[rank], rows, D, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Standard normal, as `torch.nn.EmbeddingBag`. Each rank draws all tables, one after the
        other, and keeps its own: ranks whose random numbers stand alike hold one set of tables.
        """
        own = iter(self.weight.detach())
        drawn = torch.empty_like(self.weight[0])
        for table in range(sum(self.tables)):
            drawn.normal_()
            if self.own_tables.start <= table < self.own_tables.stop:
                next(own).copy_(drawn)

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        """indices [nnz], offsets [T_local * B + 1]  ->  [B / R, num_tables, D]."""
        return embedding_all_to_all(
            self.weight, indices, offsets, ops.group_named(self.group_name), tables=self.tables,
            mode=self.mode, strategy=self.strategy, validate=self.validate, sparse=self.sparse,
        )  # fmt: skip

    def extra_repr(self) -> str:
        _, rows, D = self.weight.shape
        return f"{sum(self.tables)} tables of {rows} x {D}, {self.tables} a rank, {self.mode}"
