"""Expert parallelism against the reference, forward and backward, on small integers: exact."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from flux_megatron import reference
from flux_megatron.expert_parallel import ops
from flux_megatron.lab.bench.table_run import Run
from flux_megatron.problem import Plan
from flux_megatron.symm.step import synchronize

ASK_HOST = ("signalled", "sequential")  # for counts, so their calls cannot be captured


def routed(rows: int, ranks: int, experts: int, skew: float, seed: int) -> Tensor:
    """int32 [R, E]: `rows` of a rank to all experts, a share `skew` of them to the first."""
    made = torch.Generator().manual_seed(seed)
    share = torch.full((ranks * experts,), (1 - skew) / (ranks * experts))
    share[0] += skew
    chosen = torch.multinomial(share, rows, replacement=True, generator=made)
    return chosen.bincount(minlength=ranks * experts).to(torch.int32).view(ranks, experts)


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


@dataclass
class Verification:
    """Calls of one shape, each with rows and counts of its own, in the same memory."""

    run: Run
    N: int
    K: int
    experts: int
    rows: int
    plan: Plan | None = None

    def __post_init__(self) -> None:
        run, N, K, rows = self.run, self.N, self.K, self.rows
        ranks, rank = run.group.size(), run.group.rank()
        self.capacity = ranks * rows + 7
        self.w = integers(run, rank, self.experts, N, K).requires_grad_()
        self.v = integers(run, 99 + rank, self.experts, K, N).requires_grad_()
        self.dh = integers(run, 199 + rank, self.capacity, N)
        self.dy = integers(run, 299 + rank, rows, K)
        self.ws, self.vs = (leaves(run, everyone(run, one.detach())) for one in (self.w, self.v))
        self.dhs, self.dys = (leaves(run, everyone(run, one)) for one in (self.dh, self.dy))
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
        group, counts = self.run.group, self.counts
        hidden, _ = ops.a2a_gemm(
            self.x, self.w, counts, group, capacity=self.capacity, plan=self.plan
        )
        z = hidden.detach().sign().requires_grad_()
        y = ops.gemm_a2a(z, self.v, counts, group, tokens=self.rows, plan=self.plan)
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

    def where(self, name: str, made: Tensor, right: Tensor) -> str:
        """What is wrong of a result, "" if nothing: whose row is the first, and what it has.
        Collective.
        """
        counts, rank = torch.stack(everyone(self.run, self.counts)), self.run.group.rank()
        wrong = made != right.to(made.dtype)
        if not wrong.any():
            return ""
        at = wrong.flatten(0, -2).any(1).nonzero().flatten()
        row, columns = int(at[0]), wrong.flatten(0, -2)[at[0]].nonzero().flatten()
        # rows that came stand by (expert, source), those that were sent by (owner, expert)
        came = name in ("hidden", "dz")
        groups = counts[:, rank].t() if came else counts[rank]
        owner = f"row {row} of {len(wrong.flatten(0, -2))}"
        if name not in ("dw", "dv"):
            ends = groups.flatten().cumsum(0)
            group = int((ends <= row).sum())
            what = ("expert", "source") if came else ("owner", "expert")
            owner += ", behind all groups"
            if group < len(ends):
                pair = divmod(group, groups.shape[1])
                size = int(groups.flatten()[group])
                within = row - int(ends[group]) + size
                owner += f": row {within} of {size} of {what[0]} {pair[0]}, {what[1]} {pair[1]}"
        first, last = int(columns[0]), int(columns[-1])
        values = [t.flatten(0, -2)[row][columns[:4]].tolist() for t in (made, right)]
        return (
            f"{int(wrong.sum())} elements of {name} are wrong on rank {rank}, in {len(at)} rows, "
            f"{owner}, {len(columns)} columns of {first} to {last}: {values[0]} given, "
            f"{values[1]} expected; rows {at[:12].tolist()}; counts {counts.tolist()}"
        )


def verify(
    run: Run, N: int, K: int, experts: int, most: int, calls: int, plan: Plan | None = None
) -> None:
    """`AssertionError` unless calls with counts of their own are exact, captured ones too where the
    strategy does not ask the host for counts.

    All calls are made on the stream that is captured: where a gradient of x or w is summed autograd
    keeps the stream of the call that it saw first, and waits for the default one break a capture.
    """
    on_gpu = run.device.type == "cuda"
    stream = torch.cuda.Stream(run.device) if on_gpu else None
    with torch.cuda.stream(stream):
        _verify_on(stream, run, calls, Verification(run, N, K, experts, most, plan))
    if on_gpu:
        torch.cuda.synchronize(run.device)


def _verify_on(stream: torch.cuda.Stream | None, run: Run, calls: int, given: Verification) -> None:
    graph, asks_host = None, given.plan is not None and given.plan.strategy in ASK_HOST
    for call in range(calls):
        given.fill(call)
        if call == 3 and stream is not None and not asks_host:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # backward runs in threads of autograd
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                replayed = given.step()
        if graph is not None and call % 2:
            graph.replay()
            made, how = replayed, "replayed"
        else:
            made, how = given.step(), "eager"
        synchronize()
        found = [given.where(name, made[name], right) for name, right in given.expected().items()]
        every: list = [None] * run.group.size()
        dist.all_gather_object(every, [text for text in found if text], group=run.group)
        wrong = "\n".join(text for texts in every for text in texts)
        assert not wrong, f"call {call}, {how}: {wrong}"  # on all ranks alike
