"""What a library does for expert parallelism: all-to-all, a sort of the rows, grouped GEMMs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from flux_megatron.lab.bench.table_run import Run


def routed(rows: int, ranks: int, experts: int, skew: float, seed: int) -> Tensor:
    """int32 [R, E]: `rows` of a rank to all experts, a share `skew` of them to the first."""
    made = torch.Generator().manual_seed(seed)
    share = torch.full((ranks * experts,), (1 - skew) / (ranks * experts))
    share[0] += skew
    chosen = torch.multinomial(share, rows, replacement=True, generator=made)
    return chosen.bincount(minlength=ranks * experts).to(torch.int32).view(ranks, experts)


class Baseline:
    """Collective, sort and grouped GEMM; the splits are known, or fetched in each call."""

    def __init__(self, run: Run, counts: Tensor, fetch: bool) -> None:
        self.run, self.counts, self.fetch = run, counts, fetch
        self.fetch_splits()

    def fetch_splits(self) -> None:
        """`every` [R sources, R owners, E]; `order` puts rows as they come, by (source, expert),
        into the order (expert, source).
        """
        rank, ranks = self.run.group.rank(), self.run.group.size()
        self.every = self.counts.new_empty(ranks, *self.counts.shape)
        dist.all_gather_into_tensor(
            self.every.flatten(), self.counts.flatten(), group=self.run.group
        )
        came = self.every[:, rank]
        splits = torch.stack([self.every[rank].sum(1), came.sum(1)]).tolist()  # the host waits
        self.sent, self.received = splits
        experts = torch.arange(came.shape[1], device=came.device).repeat(len(came))
        of_row = torch.repeat_interleave(experts, came.flatten(), output_size=sum(self.received))
        self.order = torch.argsort(of_row, stable=True)
        self.back = torch.argsort(self.order)
        self.ends = came.sum(0).cumsum(0).to(torch.int32)

    def exchange(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        arrived = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(arrived, x, received, sent, group=self.run.group)
        return arrived

    def a2a_gemm(self, x: Tensor, w: Tensor) -> Tensor:
        if self.fetch:
            self.fetch_splits()
        rows = self.exchange(x, self.sent, self.received)
        return grouped(rows.index_select(0, self.order), w, self.ends)

    def gemm_a2a(self, x: Tensor, w: Tensor) -> Tensor:
        if self.fetch:
            self.fetch_splits()
        made = grouped(x[: sum(self.received)], w, self.ends)
        return self.exchange(made.index_select(0, self.back), self.received, self.sent)

    def a2a_gemm_backward(self, dy: Tensor, w: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """dx and dw; `rows` are those that forward has received and sorted."""
        made = grouped(dy, w, self.ends, "nn").index_select(0, self.back)
        return self.exchange(made, self.received, self.sent), wgrad(dy, rows, self.ends)

    def gemm_a2a_backward(self, dy: Tensor, w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """dx and dw; `x` is what forward has multiplied."""
        rows = self.exchange(dy, self.sent, self.received).index_select(0, self.order)
        return grouped(rows, w, self.ends, "nn"), wgrad(rows, x, self.ends)


def _slices(ends: Tensor) -> Iterator[slice]:
    """The rows of each expert, on the host."""
    first = 0
    for end in ends.tolist():
        yield slice(first, end)
        first = end


def grouped(x: Tensor, w: Tensor, ends: Tensor, layout: str = "nt") -> Tensor:
    """Each expert's rows of x times w[e]^T ("nn": w[e])."""
    right = w.transpose(-2, -1) if layout == "nt" else w
    if x.device.type == "cuda" and len(x):
        return torch._grouped_mm(x, right, offs=ends)
    return torch.cat([x[rows] @ e for rows, e in zip(_slices(ends), right, strict=True)])


def wgrad(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """[E, M, N]: a^T b over each expert's rows of a [rows, M] and b [rows, N]."""
    if a.device.type == "cuda" and len(a):
        return torch._grouped_mm(a.t(), b, offs=ends)
    return torch.stack([a[rows].t() @ b[rows] for rows in _slices(ends)])
