"""What a library does for expert parallelism: all-to-all, a sort of the rows, grouped GEMMs. And
what is right: the reference, forward and backward, on small integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from flux_megatron import reference
from flux_megatron.expert_parallel import ops
from flux_megatron.lab.bench.table_run import Run
from flux_megatron.problem import Plan
from flux_megatron.symm.step import synchronize

ASK_HOST = ("signalled", "sequential")  # for counts, so their calls cannot be captured


def everyone(run: Run, mine: Tensor) -> list[Tensor]:
    """Tensors of all ranks, of any sizes, on the host. Collective."""
    found: list = [None] * run.group.size()
    dist.all_gather_object(found, mine.cpu(), group=run.group)
    return found


def integers(run: Run, seed: int, *shape: int) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    values = torch.randint(-1, 2, shape, generator=made) * (torch.rand(shape, generator=made) < 0.2)
    return values.to(run.device, getattr(torch, run.about.dtype))


def leaves(run: Run, tensors: list[Tensor]) -> list[Tensor]:
    """Of all ranks, in fp64, for autograd of the reference."""
    return [one.detach().to(run.device, torch.float64).requires_grad_() for one in tensors]


def routed(rows: int, ranks: int, experts: int, skew: float, seed: int) -> Tensor:
    """int32 [R, E]: `rows` of a rank to all experts, a share `skew` of them to the first."""
    made = torch.Generator().manual_seed(seed)
    share = torch.full((ranks * experts,), (1 - skew) / (ranks * experts))
    share[0] += skew
    chosen = torch.multinomial(share, rows, replacement=True, generator=made)
    return chosen.bincount(minlength=ranks * experts).to(torch.int32).view(ranks, experts)


@dataclass
class Baseline:
    """Collective, sort and grouped GEMM; the splits are known, or fetched in each call."""

    run: Run
    counts: Tensor
    fetch: bool

    def __post_init__(self) -> None:
        self._fetch_splits()

    def _fetch_splits(self) -> None:
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
            self._fetch_splits()
        rows = self.exchange(x, self.sent, self.received)
        return grouped(rows.index_select(0, self.order), w, self.ends)

    def gemm_a2a(self, x: Tensor, w: Tensor) -> Tensor:
        if self.fetch:
            self._fetch_splits()
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
    if x.device.type == "cuda":
        return torch._grouped_mm(x, right, offs=ends)
    return torch.cat([x[rows] @ e for rows, e in zip(_slices(ends), right, strict=True)])


def wgrad(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """[E, M, N]: a^T b over each expert's rows of a [rows, M] and b [rows, N]."""
    if a.device.type == "cuda":
        return torch._grouped_mm(a.t(), b, offs=ends)
    return torch.stack([a[rows].t() @ b[rows] for rows in _slices(ends)])


@dataclass
class Verification:
    """Calls of one shape, each with rows and counts of its own, in the same memory."""

    run: Run
    N: int
    K: int
    experts: int
    rows: int
    plan: Plan

    def __post_init__(self) -> None:
        run, N, K, rows = self.run, self.N, self.K, self.rows
        ranks, rank = run.group.size(), run.group.rank()
        self.capacity = ranks * rows + 7
        self.w = integers(run, rank, self.experts, N, K).requires_grad_()
        self.v = integers(run, 99 + rank, self.experts, K, N).requires_grad_()
        self.dh = integers(run, 199 + rank, self.capacity, N)
        self.dy = integers(run, 299 + rank, rows, K)
        given = self.w.detach(), self.v.detach(), self.dh, self.dy
        self.ws, self.vs, self.dhs, self.dys = (leaves(run, everyone(run, one)) for one in given)
        self.x = torch.empty(rows, K, dtype=self.w.dtype, device=run.device, requires_grad=True)
        self.counts = torch.zeros(ranks, self.experts, dtype=torch.int32, device=run.device)

    def fill(self, call: int) -> None:
        skew, rank = (0.0, 0.9, 0.5)[call % 3], self.run.group.rank()
        ranks, experts = self.counts.shape
        self.counts.copy_(routed(self.rows, ranks, experts, skew, 10 * call + rank))
        if call % 5 == 4:  # all to the last expert of the last rank
            self.counts.zero_()[-1, -1] = self.rows
        with torch.no_grad():
            self.x.copy_(integers(self.run, call * 7 + rank, self.rows, self.K))

    def step(self) -> dict[str, Tensor]:
        """Both operations, forward and backward."""
        group, counts, plan = self.run.group, self.counts, self.plan
        hidden, _ = ops.a2a_gemm(self.x, self.w, counts, group, capacity=self.capacity, plan=plan)
        z = hidden.detach().sign().requires_grad_()
        y = ops.gemm_a2a(z, self.v, counts, group, tokens=self.rows, plan=plan)
        dx, dw = torch.autograd.grad(hidden, (self.x, self.w), self.dh)
        dz, dv = torch.autograd.grad(y, (z, self.v), self.dy)
        return {"hidden": hidden, "y": y, "dx": dx, "dw": dw, "dz": dz, "dv": dv}

    def expected(self) -> dict[str, Tensor]:
        """What `step` must give on this rank. Collective."""
        counts, ranks = everyone(self.run, self.counts), self.run.group.size()
        x = leaves(self.run, everyone(self.run, self.x.detach()))
        hidden, _ = reference.a2a_gemm(x, self.ws, counts, self.capacity)
        z = leaves(self.run, [one.sign() for one in hidden])
        y = reference.gemm_a2a(z, self.vs, counts)
        first = torch.autograd.grad(hidden, [*x, *self.ws], self.dhs)
        second = torch.autograd.grad(y, [*z, *self.vs], self.dys)
        all_ranks = {
            "hidden": hidden, "y": y, "dx": first[:ranks], "dw": first[ranks:],
            "dz": second[:ranks], "dv": second[ranks:],
        }  # fmt: skip
        return {name: every[self.run.group.rank()] for name, every in all_ranks.items()}

    def compare(self, made: dict[str, Tensor]) -> None:
        """`ArithmeticError` where results of this rank are wrong. Collective."""
        for name, right in self.expected().items():
            if wrong := int((made[name] != right.to(made[name].dtype)).sum()):
                counts = self.counts.tolist()
                raise ArithmeticError(f"{wrong} elements of {name} are wrong; counts {counts}")


def verify(run: Run, N: int, K: int, experts: int, most: int, calls: int, plan: Plan) -> None:
    """`ArithmeticError`, on every rank, unless calls with counts of their own are exact, captured
    ones too where the strategy does not ask the host for counts.

    All calls are made on the stream that is captured: where a gradient of x or w is summed autograd
    keeps the stream of the call that it saw first, and waits for the default one break a capture.
    """
    stream = torch.cuda.Stream(run.device) if run.device.type == "cuda" else None
    with torch.cuda.stream(stream):
        given, graph = Verification(run, N, K, experts, most, plan), None
        for call in range(calls):
            given.fill(call)
            if call == 3 and stream is not None and plan.strategy not in ASK_HOST:
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                # backward runs in threads of autograd
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    replayed = given.step()
            replays = graph is not None and call % 2
            if graph is not None and replays:
                graph.replay()
            made = replayed if replays else given.step()
            synchronize()
            if said := run.failure(partial(given.compare, made)):
                title = f"{plan.strategy}, {experts} experts of {N} x {K}, call {call}"
                raise ArithmeticError(f"{title}{', replayed' if replays else ''}: {said[:4000]}")
    if stream is not None:
        torch.cuda.synchronize(run.device)
