"""Whole layers of experts, from tokens to their sums: where a token travels once to a rank, and
where its rows travel once to an expert.

| candidate | what it is |
| --- | --- |
| once | `expert_parallel.once`: no permutation, the library's grouped GEMM |
| by expert | `a2a_gemm` and `gemm_a2a`, between a permutation and its inverse |
| by expert, sorted | the same for rows that come sorted and stay so |
| nccl | the permutation, the library with splits that are known, the inverse |
| nccl + sync | it fetches the splits too, as a training step must |
| deepep | [a peer](expert_deep_ep.py), where it is installed: its layout and weights are known |
| deepep + sync | it exchanges them too, and the host waits, as a training step must |

All multiply by the router's weights, and have SwiGLU between the GEMMs. Indices of permutations are
known. Before a case `once` is compared with the library, forward and backward, without the
activation: small integers, exact, new choices in every call; also replayed from a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flux_megatron.expert_parallel import activation, once, ops
from flux_megatron.lab.bench import operations
from flux_megatron.lab.bench.operations import expert_deep_ep
from flux_megatron.lab.bench.operations.expert_all_to_all import Case, Operands
from flux_megatron.lab.bench.operations.expert_deep_ep import DeepEp
from flux_megatron.lab.bench.operations.expert_references import Baseline, grouped, wgrad
from flux_megatron.lab.bench.table_run import Run

MODELS = (
    Case("Qwen3-30B-A3B", 2048, 768, 128, 8, 4096, 0.0),
    Case("gpt-oss-20b-like", 2944, 2944, 32, 4, 4096, 0.0),
    Case("DeepSeek-V3-like", 7168, 2048, 64, 8, 2048, 0.0),
    Case("mixtral", 4096, 14336, 8, 2, 4096, 0.0),
)
CASES = tuple(replace(case, skew=skew) for case in MODELS for skew in (0.0, 0.33))
SMALL = (Case("tiny", 32, 48, 8, 3, 24, 0.33),)
CHECKED = {
    "cpu": Case("checked", 32, 16, 8, 3, 24, 0.0),
    "cuda": Case("checked", 512, 128, 64, 8, 1000, 0.0),
}
Layer = Callable[..., Tensor]


def measure(run: Run, case: Case, rounds: int) -> None:
    """Rows of both directions. `ArithmeticError` if ours is wrong."""
    verify(run)
    work = Work(case, run)
    for direction, calls in (("forward", work.forward()), ("backward", work.backward())):
        title, columns = f"{case}, {direction}", {"direction": direction, **asdict(case)}
        if not operations.race_row(run, "expert_layers", rounds, calls, title, **columns):
            break


def verify(run: Run) -> None:
    with operations.captured_stream(run):
        work = Work(CHECKED[run.device.type], run, gated=False)
        ours = operations.and_in_graphs(run, {"once": partial(work.step, work.once)})
        ours |= {name: partial(work.step, layer) for name, layer in work.peers().items()}
        operations.verify(run, work.renew, ours, partial(work.step, work.library(fetched=True)))


class Work(Operands):
    """One rank's operands: x [T, hidden], weights [T, experts], w and v of its experts."""

    def __init__(self, case: Case, run: Run, gated: bool = True) -> None:
        super().__init__(case, run)
        self.gated = gated
        ranks = run.group.size()
        experts = case.experts // ranks
        self.capacity = case.tokens * min(case.topk, experts) * ranks
        self.x, self.dy = (self.random(case.tokens, case.hidden) for _ in range(2))
        self.w = self.random(experts, (1 + gated) * case.ffn, case.hidden)
        self.v = self.random(experts, case.hidden, case.ffn)
        self.weights = torch.rand(case.tokens, case.experts, device=run.device)
        self.chosen = torch.zeros(case.tokens, case.experts, dtype=torch.bool, device=run.device)
        self._choose(case.topk)

    def _choose(self, topk: int) -> None:
        """`topk` experts a token, the first one of a share `skew` of them."""
        score = torch.rand(self.chosen.shape, generator=self.made, device=self.run.device)
        score[:, 0] += score[:, 1] < self.case.skew
        best = score.topk(topk, 1).indices
        self.chosen.zero_().scatter_(1, best, True)
        self._know()

    def _know(self) -> None:
        """What the library must know of the choices."""
        ranks = self.run.group.size()
        by_expert = self.chosen.t()
        self.rows = by_expert.nonzero()[:, 1]
        self.weight_at = by_expert.flatten().nonzero().flatten()
        self.counts = by_expert.sum(1, dtype=torch.int32).view(ranks, -1)
        self.known = Baseline(self.run, self.counts, False)
        if expert_deep_ep.installed():
            topk = self.case.topk
            self.deep_ep = DeepEp(self.run.group, self.x, self.chosen, self.weights, topk)

    def renew(self) -> None:
        """Other operands and other choices, in the same memory; every fifth time fewer experts a
        token, or all tokens to the last one.
        """
        operations.fill(self.made, self.x, self.dy, self.w, self.v, self.weights)
        self.weights.masked_fill_(self.weights == 0, 1.0)  # TransformerEngine takes 0 for padding
        self._choose(self.case.topk - self.calls % 5 // 3)
        if self.calls % 5 == 4:
            self.chosen.zero_()[:, -1] = True
            self._know()
        self.calls += 1

    def leaves(self) -> tuple[Tensor, ...]:
        return tuple(t.detach().requires_grad_() for t in (self.x, self.weights, self.w, self.v))

    def step(self, layer: Layer) -> dict[str, Tensor]:
        leaves = self.leaves()
        y = layer(*leaves)
        names = "dx", "dweights", "dw", "dv"
        return {"y": y} | dict(zip(names, torch.autograd.grad(y, leaves, self.dy), strict=True))

    def once(self, x: Tensor, weights: Tensor, w: Tensor, v: Tensor) -> Tensor:
        group = self.run.group
        routes, of_rows = once.route(
            self.chosen, weights, group, topk=self.case.topk, capacity=self.capacity
        )
        hidden = once.multiply(once.send(x, routes, group), w, routes)
        if self.gated:
            hidden = activation.gated(hidden, routes.received, F.silu, of_rows)
        else:
            hidden = activation.scaled(hidden, of_rows)
        return once.give_back(once.multiply(hidden, v, routes), routes, group)

    def by_expert(self, rows: Tensor, weights: Tensor, w: Tensor, v: Tensor) -> Tensor:
        group = self.run.group
        hidden, received = ops.a2a_gemm(rows, w, self.counts, group, capacity=self.capacity)
        hidden = activation.gated(hidden, received, F.silu)
        y = ops.gemm_a2a(hidden, v, self.counts, group, tokens=len(rows))
        return activation.scaled(y, weights)

    def library(self, fetched: bool) -> Layer:
        def layer(rows: Tensor, weights: Tensor, w: Tensor, v: Tensor) -> Tensor:
            base = self.known
            if fetched:
                base.fetch_splits()
            came = _Exchange.apply(rows, base, False).index_select(0, base.order)
            hidden = _Grouped.apply(came, w, base.ends)
            if self.gated:
                gate, linear = hidden.chunk(2, -1)
                hidden = F.silu(gate) * linear
            made = _Grouped.apply(hidden, v, base.ends).index_select(0, base.back)
            return activation.scaled(_Exchange.apply(made, base, True), weights)

        return partial(self.permuted, layer)

    def peers(self) -> dict[str, Layer]:
        if not expert_deep_ep.installed():
            return {}
        named = {"deepep": True, "deepep + sync": False}
        return {name: partial(self.by_deep_ep, known) for name, known in named.items()}

    def by_deep_ep(self, known: bool, x: Tensor, weights: Tensor, w: Tensor, v: Tensor) -> Tensor:
        rows, of_rows, ends, layout = self.deep_ep.dispatch(x, weights, known)
        hidden = _Grouped.apply(rows, w, ends)
        if self.gated:
            counts = ends.diff(prepend=ends.new_zeros(1))
            hidden = activation.gated(hidden, counts[None], F.silu, of_rows)
        else:
            hidden = activation.scaled(hidden, of_rows)
        return self.deep_ep.combine(_Grouped.apply(hidden, v, ends), layout)

    def permuted(self, layer: Layer, x: Tensor, weights: Tensor, w: Tensor, v: Tensor) -> Tensor:
        """A layer of sorted rows, between a permutation and its inverse."""
        rows, of_rows = self.sorted(x, weights)
        return torch.zeros_like(x).index_add(0, self.rows, layer(rows, of_rows, w, v))

    def sorted(self, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return x.index_select(0, self.rows), weights.t().flatten()[self.weight_at]

    def _layers(self) -> dict[str, tuple[Layer, tuple[Tensor, ...], Tensor]]:
        """By candidate what it does, with what, and the gradient of that."""
        leaves = self.leaves()
        rows, weights = (one.detach().requires_grad_() for one in self.sorted(*leaves[:2]))
        whole: dict[str, Layer] = {
            "once": self.once, "by expert": partial(self.permuted, self.by_expert),
            "nccl": self.library(False), "nccl + sync": self.library(True),
        }  # fmt: skip
        whole |= self.peers()
        found = {name: (layer, leaves, self.dy) for name, layer in whole.items()}
        dy = self.dy.index_select(0, self.rows)
        found["by expert, sorted"] = self.by_expert, (rows, weights, *leaves[2:]), dy
        return found

    def forward(self) -> dict[str, Callable[[], object]]:
        return {name: partial(layer, *given) for name, (layer, given, _) in self._layers().items()}

    def backward(self) -> dict[str, Callable[[], object]]:
        return {
            name: partial(torch.autograd.grad, layer(*given), given, dy, retain_graph=True)
            for name, (layer, given, dy) in self._layers().items() if "sync" not in name
        }  # fmt: skip


class _Exchange(torch.autograd.Function):
    """The library's all-to-all, to the experts or `home`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, base: Baseline, home: bool) -> Tensor:
        ctx.splits = (base.sent, base.received) if not home else (base.received, base.sent)
        ctx.base = base
        return base.exchange(rows.contiguous(), *ctx.splits)

    @staticmethod
    def backward(ctx: Any, dy: Tensor):
        return ctx.base.exchange(dy.contiguous(), *ctx.splits[::-1]), None, None


class _Grouped(torch.autograd.Function):
    """The library's grouped GEMM."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, w, ends)
        return grouped(rows, w, ends)

    @staticmethod
    def backward(ctx: Any, dy: Tensor):
        rows, w, ends = ctx.saved_tensors
        dy = dy.contiguous()
        return grouped(dy, w, ends, "nn"), wgrad(dy, rows, ends), None
