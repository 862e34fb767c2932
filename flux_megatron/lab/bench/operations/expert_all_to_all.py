"""`a2a_gemm` and `gemm_a2a` beside NCCL's all-to-all, a sort by expert and a grouped GEMM.

Before each case every strategy is compared with the library, with as many experts, forward and
backward: small integers, exact, new counts in every call; those that ask no host also replayed from
a CUDA graph. Then all candidates of an operation are timed in turns.

| candidate | what it is |
| --- | --- |
| hopper, fused, signalled, sequential | our strategies by their default plans, where they can run |
| nccl | the library with splits that are known |
| nccl + sync | it fetches the splits too, as forward of a training step must |
| gemm, a2a, wgrad | its parts |
| own gemm, own wgrad | ours, with all rows at home |

Backward gives dx and dw. Counts are those of a uniform router, and of one whose first expert gets a
third of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from torch import Tensor

from flux_megatron.expert_parallel import call, ops
from flux_megatron.expert_parallel.wgrad import weight_gradient
from flux_megatron.lab.bench import operations
from flux_megatron.lab.bench.operations.expert_references import Baseline, grouped, routed, wgrad
from flux_megatron.lab.bench.table_run import Run
from flux_megatron.overlap.operands import LAYOUTS
from flux_megatron.problem import Plan
from flux_megatron.symm.workspaces import workspace

CHECKED = {"cpu": (24, 16, 20), "cuda": (1088, 512, 1500)}  # ffn, hidden and tokens, verified
ASK_HOST = ("signalled", "sequential")  # for counts, so their calls cannot be captured
Calls = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Case:
    """An expert's GEMMs: hidden to ffn, and back. `experts` of all ranks, `tokens` of each; the
    first expert gets a share `skew` of their rows.
    """

    model: str
    hidden: int
    ffn: int
    experts: int
    topk: int
    tokens: int
    skew: float

    @property
    def rows(self) -> int:
        """That a rank sends."""
        return self.tokens * self.topk

    def __str__(self) -> str:
        return f"{self.model}, {self.tokens} tokens, skew {self.skew}"


MODELS = (
    Case("mixtral", 4096, 14336, 8, 2, 4096, 0.0),
    Case("mixtral", 4096, 14336, 8, 2, 8192, 0.0),
    Case("fine 2048", 2048, 2048, 64, 8, 4096, 0.0),
    Case("fine 7168", 7168, 2048, 64, 8, 4096, 0.0),
)
CASES = tuple(replace(case, skew=skew) for case in MODELS for skew in (0.0, 0.33))
SMALL = (Case("tiny", 32, 48, 4, 2, 24, 0.33),)


def plans(run: Run, x: Tensor, N: int) -> dict[str, Plan]:
    """The default plan of each strategy that can run here, the one that calls choose first."""
    space = workspace(run.group, run.device)
    return {
        name: strategy.default_plan(x, N)
        for name, strategy in call.STRATEGIES.items()
        if all(strategy.supports(x, N, layout, space) is None for layout in LAYOUTS)
    }


def verify(run: Run, experts: int) -> None:
    ffn, hidden, tokens = CHECKED[run.device.type]
    with operations.captured_stream(run):
        case = Case("verified", hidden, ffn, experts, 1, tokens, 0.0)
        work = Work(case, run, capacity=run.group.size() * tokens + 7)
        for name, plan in work.plans.items():
            ours: dict[str, operations.Call] = {name: partial(work.step, plan)}
            if name not in ASK_HOST:
                ours = operations.and_in_graphs(run, ours)
            operations.verify(run, work.renew, ours, work.expected)


def measure(run: Run, case: Case, rounds: int) -> None:
    """Rows of both operations, forward and backward. `ArithmeticError` if ours is wrong."""
    verify(run, case.experts)
    work = Work(case, run)
    for operation, calls in work.candidates():
        in_time = operations.race_row(
            run, "expert_parallel", rounds, calls, f"{case}, {operation}", operation=operation,
            **asdict(case), plans={name: plan.dumps() for name, plan in work.plans.items()},
        )  # fmt: skip
        del calls
        if not in_time:
            break


class Operands:
    """Of one rank; `calls` are those that had other ones before."""

    def __init__(self, case: Case, run: Run) -> None:
        self.case, self.run, self.calls = case, run, 0
        self.made = operations.generator(run)

    def random(self, *shape: int) -> Tensor:
        dtype = getattr(torch, self.run.about.dtype)
        return torch.randn(*shape, device=self.run.device, dtype=dtype) / 8


class Work(Operands):
    """x [rows, hidden] to w and z [capacity, ffn] to v, and back."""

    def __init__(self, case: Case, run: Run, capacity: int = 0) -> None:
        super().__init__(case, run)
        ranks, rank = run.group.size(), run.group.rank()
        experts = case.experts // ranks
        self.counts = routed(case.rows, ranks, experts, case.skew, rank).to(run.device)
        self.known = Baseline(run, self.counts, False)
        self.fetched = Baseline(run, self.counts, True)
        self.received = self.known.every[:, rank].contiguous()
        self.came = int(self.received.sum())
        self.capacity = capacity or max(case.rows, int(self.known.every.sum((0, 2)).max()))
        self.at_home = torch.zeros_like(self.counts)  # the same rows, none of which travels
        self.at_home[rank] = self.known.every[:, rank].sum(0)
        self.w = self.random(experts, case.ffn, case.hidden)
        self.v = self.random(experts, case.hidden, case.ffn)
        self.x = self.random(case.rows, case.hidden)
        self.z = self.random(self.capacity, case.ffn)
        self.dy = self.random(case.rows, case.hidden)
        self.dh = self.random(self.capacity, case.ffn)
        self.arrived = self.random(self.came, case.hidden)
        self.plans = plans(run, self.x, case.ffn)

    def there(self, x: Tensor, w: Tensor, counts: Tensor, plan: Plan | None) -> Tensor:
        group = self.run.group
        return ops.a2a_gemm(x, w, counts, group, capacity=self.capacity, plan=plan)[0]

    def back(self, z: Tensor, v: Tensor, counts: Tensor, plan: Plan | None) -> Tensor:
        tokens = self.came if counts is self.at_home else self.case.rows
        return ops.gemm_a2a(z, v, counts, self.run.group, tokens=tokens, plan=plan)

    def renew(self) -> None:
        """Other operands and other counts, in the same memory; every fifth time all rows go to the
        last expert.
        """
        operations.fill(self.made, self.w, self.v, self.x, self.z, self.dy, self.dh)
        skew, seed = (0.0, 0.9, 0.5)[self.calls % 3], 10 * self.calls + self.run.group.rank()
        ranks, experts = self.counts.shape
        self.counts.copy_(routed(self.case.rows, ranks, experts, skew, seed))
        if self.calls % 5 == 4:
            self.counts.zero_()[-1, -1] = self.case.rows
        self.calls += 1

    def step(self, plan: Plan) -> dict[str, Tensor]:
        x, w, z, v = (t.detach().requires_grad_() for t in (self.x, self.w, self.z, self.v))
        hidden, y = self.there(x, w, self.counts, plan), self.back(z, v, self.counts, plan)
        dx, dw = torch.autograd.grad(hidden, (x, w), self.dh)
        dz, dv = torch.autograd.grad(y, (z, v), self.dy)
        return {"hidden": hidden, "y": y, "dx": dx, "dw": dw, "dz": dz, "dv": dv}

    def expected(self) -> dict[str, Tensor]:
        library, w, v = self.fetched, self.w, self.v
        hidden, y = library.a2a_gemm(self.x, w), library.gemm_a2a(self.z, v)
        rows = library.exchange(self.x, library.sent, library.received)[library.order]
        dx, dw = library.a2a_gemm_backward(self.dh[: len(rows)], w, rows)
        dz, dv = library.gemm_a2a_backward(self.dy, v, self.z[: len(rows)])
        return {"hidden": hidden, "y": y, "dx": dx, "dw": dw, "dz": dz, "dv": dv}

    def candidates(self) -> Iterator[tuple[str, Calls]]:
        """By operation: ours by strategy, the baselines, then the parts of both."""
        known, fetched, ends, arrived = self.known, self.fetched, self.known.ends, self.arrived
        x, w, z, v, dy = self.x, self.w, self.z, self.v, self.dy
        hidden, dh = z[: self.came], self.dh[: self.came]
        out = partial(known.exchange, x, known.sent, known.received)
        home = partial(known.exchange, arrived, known.received, known.sent)
        yield "a2a_gemm", self._ours(self.there, x, w) | {
            "nccl": lambda: known.a2a_gemm(x, w), "nccl + sync": lambda: fetched.a2a_gemm(x, w),
            "gemm": lambda: grouped(arrived, w, ends),
            "own gemm": lambda: self.there(arrived, w, self.at_home, None), "a2a": out,
        }  # fmt: skip
        yield "gemm_a2a", self._ours(self.back, z, v) | {
            "nccl": lambda: known.gemm_a2a(z, v), "nccl + sync": lambda: fetched.gemm_a2a(z, v),
            "gemm": lambda: grouped(hidden, v, ends),
            "own gemm": lambda: self.back(z, v, self.at_home, None), "a2a": home,
        }  # fmt: skip
        yield "a2a_gemm backward", self._gradients(self.there, x, w, self.dh) | {
            "nccl": lambda: known.a2a_gemm_backward(dh, w, arrived),
            "gemm": lambda: grouped(dh, w, ends, "nn"), "wgrad": lambda: wgrad(dh, arrived, ends),
            "own wgrad": lambda: weight_gradient(dh, arrived, self.received), "a2a": home,
        }  # fmt: skip
        yield "gemm_a2a backward", self._gradients(self.back, z, v, dy) | {
            "nccl": lambda: known.gemm_a2a_backward(dy, v, hidden),
            "gemm": lambda: grouped(arrived, v, ends, "nn"),
            "wgrad": lambda: wgrad(arrived, hidden, ends),
            "own wgrad": lambda: weight_gradient(arrived, hidden, self.received),
            "a2a": partial(known.exchange, dy, known.sent, known.received),
        }  # fmt: skip

    def _ours(self, operation: Callable[..., Tensor], x: Tensor, w: Tensor) -> Calls:
        return {n: partial(operation, x, w, self.counts, plan) for n, plan in self.plans.items()}

    def _gradients(
        self, operation: Callable[..., Tensor], x: Tensor, w: Tensor, dy: Tensor
    ) -> Calls:
        x, w = (one.detach().requires_grad_() for one in (x, w))
        forward = self._ours(operation, x, w)
        return {
            name: partial(torch.autograd.grad, made(), (x, w), dy, retain_graph=True)
            for name, made in forward.items()
        }
