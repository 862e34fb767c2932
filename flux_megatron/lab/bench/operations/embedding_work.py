"""The sizes of Embedding + All-to-All that are measured, and one rank's operands and candidates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from flux_megatron.embedding import operation, sequential_bags
from flux_megatron.embedding.bags import Bags
from flux_megatron.lab.bench.table_run import Run


@dataclass(frozen=True)
class Case:
    batch: int
    tables: int  # of all ranks
    pooling: int  # entries of a bag: half to one and a half times as many
    dtype: torch.dtype = torch.float32
    rows: int = 100_000
    D: int = 128
    hot: float = 0.0  # the share of entries that name the first row

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"B={self.batch} T={self.tables} L={self.pooling} D={self.D} {dtype}"
            + f" hot {self.hot}" * bool(self.hot)
        )


BF16 = torch.bfloat16
CASES = (
    Case(2048, 64, 20), Case(8192, 64, 50), Case(16384, 64, 70), Case(8192, 128, 20),
    Case(16384, 256, 20), Case(8192, 64, 50, BF16), Case(16384, 128, 20, BF16),
    Case(8192, 64, 50, hot=0.1),
)  # fmt: skip
# the second one has the sizes of the first: nothing made for fp32 may serve bf16
CHECKED = (
    Case(2048, 16, 20, rows=1000), Case(2048, 16, 20, BF16, rows=1000),
    Case(1022, 7, 9, BF16, rows=501, D=100), Case(2048, 6, 20, rows=300, hot=0.5),
)  # fmt: skip
SMALL = (Case(8, 4, 3, rows=9, D=8, hot=0.5), Case(8, 4, 3, BF16, rows=9, D=8, hot=0.5))


class Work:
    """One rank's operands of a case, and its candidates."""

    def __init__(self, case: Case, run: Run) -> None:
        self.case, self.run, self.group = case, run, run.group
        rank, R = run.group.rank(), run.group.size()
        each, more = divmod(case.tables, R)
        self.tables = [each + (r < more) for r in range(R)]
        local = self.tables[rank]
        made = torch.Generator(run.device).manual_seed(rank)
        options: dict[str, Any] = {"generator": made, "device": run.device}
        L = case.pooling
        lengths = torch.randint(L // 2, 3 * L // 2 + 1, (local * case.batch,), **options)
        self.offsets = F.pad(lengths.cumsum(0), (1, 0))
        nnz = int(self.offsets[-1])
        self.indices = torch.randint(case.rows, (nnz,), **options)
        if case.hot:
            self.indices[torch.rand(nnz, **options) < case.hot] = 0
        self.weight = torch.empty(local, case.rows, case.D, dtype=case.dtype, device=run.device)
        samples = case.batch // R
        self.dy = self.weight.new_empty(samples, case.tables, case.D)
        self.pooled_gradients = self.weight.new_zeros(local * case.batch, case.D)
        self.made = made
        self.bags = Bags.of(self.weight, self.offsets, self.tables, rank, "sum")
        self.flat = sequential_bags.as_one_table(self.indices, self.offsets, self.bags)
        numbers = torch.arange(lengths.numel(), device=run.device)
        self.bag_of_entry = torch.repeat_interleave(numbers, lengths, output_size=nnz)
        self.lengths = lengths
        self.sent = [samples * local * case.D] * R
        self.received = [samples * n * case.D for n in self.tables]

    def fill(self) -> None:
        """Small integers: all sums are exact in both dtypes."""
        for tensor in (self.weight, self.dy):
            tensor.random_(-1, 2, generator=self.made)

    def lookup(self) -> Tensor:
        return F.embedding_bag(
            self.flat, self.weight.flatten(0, 1), self.offsets, mode="sum", include_last_offset=True
        )

    def library(self) -> Tensor:
        case, local = self.case, len(self.weight)
        outgoing = self.lookup().view(local, case.batch, case.D).transpose(0, 1).contiguous()
        incoming = outgoing.new_empty(sum(self.received))
        dist.all_to_all_single(
            incoming, outgoing.view(-1), self.received, self.sent, group=self.group
        )
        blocks = zip(incoming.split(self.received), self.tables, strict=True)
        return torch.cat([block.view(-1, n, case.D) for block, n in blocks], 1)

    def lookup_backward(self, gradients: Tensor | None = None) -> Tensor:
        case, local = self.case, len(self.weight)
        if gradients is None:
            gradients = self.pooled_gradients
        dw = torch.ops.aten._embedding_bag_dense_backward(
            gradients, self.flat, self.bag_of_entry, self.lengths, self.lengths,
            local * case.rows, False, 0, None,
        )  # fmt: skip
        return dw.view_as(self.weight)

    def library_backward(self) -> Tensor:
        outgoing = [block.reshape(-1) for block in self.dy.split(self.tables, 1)]
        incoming = self.dy.new_empty(sum(self.sent))
        dist.all_to_all_single(
            incoming, torch.cat(outgoing), self.sent, self.received, group=self.group
        )
        gradients = incoming.view(self.case.batch, -1, self.case.D).transpose(0, 1)
        return self.lookup_backward(gradients.reshape(-1, self.case.D))

    def fused(self) -> Tensor:
        return operation._embedding_all_to_all(
            self.weight, self.indices, self.offsets, self.tables, self.group.group_name, "sum",
            "fused", False,
        )  # fmt: skip

    def fused_backward(self) -> Tensor:
        return operation._backward(
            self.dy, self.indices, self.offsets, self.case.rows, self.tables,
            self.group.group_name, "sum", "fused",
        )  # fmt: skip
