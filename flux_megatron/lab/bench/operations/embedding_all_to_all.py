"""Embedding + All-to-All beside one library lookup over all tables of a rank and NCCL.

Each case is compared with the library first, on small integers, every bit of both directions. Then
all candidates are timed in turns, eager and, on GPUs, replayed from CUDA graphs.

| candidate | forward | backward |
| --- | --- | --- |
| lookup | `F.embedding_bag` over the concatenated tables | its gradient |
| library | the same, and `all_to_all_single` | the same behind `all_to_all_single` |
| fused | ours | ours |

The library is given its indices for concatenated tables, and the bag of each entry, for nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from flux_megatron.embedding import operation, sequential_bags
from flux_megatron.embedding.bags import Bags
from flux_megatron.lab.bench import operations
from flux_megatron.lab.bench.table_run import Run
from flux_megatron.tuning.timing import race

NAMES = ("lookup", "library", "fused")


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
SMALL = (Case(8, 4, 3, rows=9, D=8, hot=0.5), Case(8, 4, 3, BF16, rows=9, D=8, hot=0.5))


def measure(run: Run, case: Case, rounds: int) -> None:
    """Rows of both directions. `ArithmeticError` if ours is wrong."""
    work = Work(case, run)
    about = replace(run.about, dtype=str(case.dtype).removeprefix("torch."))
    rows = replace(run, about=about)  # what it says of the run comes last in a row
    for direction, suffix in (("forward", ""), ("backward", "_backward")):
        eager: dict[str, operations.Call] = {name: getattr(work, name + suffix) for name in NAMES}
        calls = operations.and_in_graphs(run, eager)
        ours = {name: call for name, call in calls.items() if name.startswith("fused")}
        operations.verify(run, work.fill, ours, eager["library"])
        found = race(calls, group=run.group, device=run.device, rounds=rounds)
        us = {name: found.median_us(name) for name in found.times_us}
        for name in us:
            rows.row(
                "embedding_a2a", direction=direction, candidate=name,
                **asdict(case), median_us=round(us[name], 1),
                times_us=[round(t, 1) for t in found.times_us[name]],
            )  # fmt: skip
        shown = {name: round(one) for name, one in us.items()}
        run.say(f"{case} {direction}, us: {shown}, failed: {found.failures or 'none'}")


class Work:
    def __init__(self, case: Case, run: Run) -> None:
        self.case, self.run, self.group = case, run, run.group
        rank, R = run.group.rank(), run.group.size()
        each, more = divmod(case.tables, R)
        self.tables = [each + (r < more) for r in range(R)]
        local = self.tables[rank]
        self.made = torch.Generator(run.device).manual_seed(rank)
        options: dict[str, Any] = {"generator": self.made, "device": run.device}
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
        dw = torch.ops.aten._embedding_bag_dense_backward(
            self.pooled_gradients if gradients is None else gradients, self.flat,
            self.bag_of_entry, self.lengths, self.lengths, len(self.weight) * self.case.rows,
            False, 0, None,
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
