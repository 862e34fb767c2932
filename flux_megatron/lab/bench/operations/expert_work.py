"""The sizes of expert parallelism that are measured, and one rank's operands and candidates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from flux_megatron.dispatch import LAYOUTS
from flux_megatron.expert_parallel import call, ops
from flux_megatron.expert_parallel.wgrad import weight_gradient
from flux_megatron.lab.bench.operations.expert_baseline import Baseline, grouped, wgrad
from flux_megatron.lab.bench.operations.expert_verification import routed
from flux_megatron.lab.bench.table_run import Run
from flux_megatron.problem import Plan
from flux_megatron.symm.workspace import workspace

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


SKEWS = (0.0, 0.33)
MODELS = (
    Case("mixtral", 4096, 14336, 8, 2, 4096, 0.0),
    Case("mixtral", 4096, 14336, 8, 2, 8192, 0.0),
    Case("fine 2048", 2048, 2048, 64, 8, 4096, 0.0),
    Case("fine 7168", 7168, 2048, 64, 8, 4096, 0.0),
)
CASES = tuple(replace(case, skew=skew) for case in MODELS for skew in SKEWS)
SMALL = (Case("tiny", 32, 48, 4, 2, 24, 0.33),)


def plans(run: Run, x: Tensor, N: int) -> dict[str, Plan]:
    """The default plan of each strategy that can run here, the one that calls choose first."""
    space = workspace(run.group, run.device)
    return {
        name: strategy.default_plan(x, N)
        for name, strategy in call.STRATEGIES.items()
        if all(strategy.supports(x, N, layout, space) is None for layout in LAYOUTS)
    }


class Work:
    """One rank's operands: x [rows, hidden] to w and z [capacity, ffn] to v, and back."""

    def __init__(self, case: Case, run: Run) -> None:
        self.case, self.run, self.group = case, run, run.group
        ranks, rank = run.group.size(), run.group.rank()
        experts = case.experts // ranks
        self.counts = routed(case.rows, ranks, experts, case.skew, rank).to(run.device)
        self.known = Baseline(run, self.counts, False)
        self.fetched = Baseline(run, self.counts, True)
        self.received = self.known.every[:, rank].contiguous()
        self.came = int(self.received.sum())
        self.capacity = max(case.rows, int(self.known.every.sum((0, 2)).max()))
        self.at_home = torch.zeros_like(self.counts)  # the same rows, none of which travels
        self.at_home[rank] = self.known.every[:, rank].sum(0)
        self.w = self._random(experts, case.ffn, case.hidden)
        self.v = self._random(experts, case.hidden, case.ffn)
        self.x = self._random(case.rows, case.hidden)
        self.z = self._random(self.capacity, case.ffn)
        self.dy = self._random(case.rows, case.hidden)
        self.dh = self._random(self.capacity, case.ffn)
        self.arrived = self._random(self.came, case.hidden)
        self.plans = plans(run, self.x, case.ffn)

    def _random(self, *shape: int) -> Tensor:
        dtype = getattr(torch, self.run.about.dtype)
        return torch.randn(*shape, device=self.run.device, dtype=dtype) / 8

    def there(self, x: Tensor, w: Tensor, counts: Tensor, plan: Plan | None) -> Tensor:
        return ops.a2a_gemm(x, w, counts, self.group, capacity=self.capacity, plan=plan)[0]

    def back(self, z: Tensor, v: Tensor, counts: Tensor, tokens: int, plan: Plan | None) -> Tensor:
        return ops.gemm_a2a(z, v, counts, self.group, tokens=tokens, plan=plan)

    def candidates(self) -> Iterator[tuple[str, Calls]]:
        """By operation: ours by strategy, the baselines, then the parts of both."""
        yield "a2a_gemm", self._a2a_gemm()
        yield "gemm_a2a", self._gemm_a2a()
        yield "a2a_gemm backward", self._a2a_gemm_backward()
        yield "gemm_a2a backward", self._gemm_a2a_backward()

    def _a2a_gemm(self) -> Calls:
        x, w, known = self.x, self.w, self.known
        return {
            **{name: partial(self.there, x, w, self.counts, p) for name, p in self.plans.items()},
            "nccl": lambda: known.a2a_gemm(x, w),
            "nccl + sync": lambda: self.fetched.a2a_gemm(x, w),
            "gemm": lambda: grouped(self.arrived, w, known.ends),
            "own gemm": lambda: self.there(self.arrived, w, self.at_home, None),
            "a2a": lambda: known.exchange(x, known.sent, known.received),
        }

    def _gemm_a2a(self) -> Calls:
        z, v, known, rows = self.z, self.v, self.known, self.case.rows
        return {
            **{n: partial(self.back, z, v, self.counts, rows, p) for n, p in self.plans.items()},
            "nccl": lambda: known.gemm_a2a(z, v),
            "nccl + sync": lambda: self.fetched.gemm_a2a(z, v),
            "gemm": lambda: grouped(z[: self.came], v, known.ends),
            "own gemm": lambda: self.back(z, v, self.at_home, self.came, None),
            "a2a": lambda: known.exchange(self.arrived, known.received, known.sent),
        }

    def _a2a_gemm_backward(self) -> Calls:
        known, dy = self.known, self.dh[: self.came]
        x, w = (one.detach().requires_grad_() for one in (self.x, self.w))
        made = {name: self.there(x, w, self.counts, plan) for name, plan in self.plans.items()}
        return {
            **{name: _gradients(y, (x, w), self.dh) for name, y in made.items()},
            "nccl": lambda: known.a2a_gemm_backward(dy, self.w, self.arrived),
            "gemm": lambda: grouped(dy, self.w, known.ends, "nn"),
            "wgrad": lambda: wgrad(dy, self.arrived, known.ends),
            "own wgrad": lambda: weight_gradient(dy, self.arrived, self.received),
            "a2a": lambda: known.exchange(self.arrived, known.received, known.sent),
        }

    def _gemm_a2a_backward(self) -> Calls:
        known, hidden, rows = self.known, self.z[: self.came], self.case.rows
        z, v = (one.detach().requires_grad_() for one in (self.z, self.v))
        made = {name: self.back(z, v, self.counts, rows, p) for name, p in self.plans.items()}
        return {
            **{name: _gradients(y, (z, v), self.dy) for name, y in made.items()},
            "nccl": lambda: known.gemm_a2a_backward(self.dy, self.v, hidden),
            "gemm": lambda: grouped(self.arrived, self.v, known.ends, "nn"),
            "wgrad": lambda: wgrad(self.arrived, hidden, known.ends),
            "own wgrad": lambda: weight_gradient(self.arrived, hidden, self.received),
            "a2a": lambda: known.exchange(self.dy, known.sent, known.received),
        }


def _gradients(y: Tensor, of: tuple[Tensor, Tensor], dy: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(y, of, dy, retain_graph=True)
