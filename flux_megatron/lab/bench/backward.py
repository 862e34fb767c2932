"""The cases of a layer's whole backward: its communication, dgrad, and wgrad into main_grad."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron.lab import reference
from flux_megatron.lab.bench.candidates import (
    Candidate,
    expected,
    plan_of_auto,
    widened,
    with_strategy,
)
from flux_megatron.lab.bench.records import LIBRARY, OURS
from flux_megatron.lab.bench.suites import Case
from flux_megatron.nn import functions
from flux_megatron.overlap import registry
from flux_megatron.patterns import COLUMN, ROW
from flux_megatron.problem import Pattern, Problem
from flux_megatron.wgrad import accumulate_wgrad_by_torch


class Backward:
    """Operands of a layer's backward on this rank, and the reference.

    | tensor | column | row |
    | --- | --- | --- |
    | x | [M / R, K] | [M, K / R] |
    | w, main_grad (fp32) | [N / R, K] | [N, K / R] |
    | dy | [M, N / R] | [M / R, N] |
    | gathered | x of all: [M, K] | dy of all: [M, N] |
    | reference: dx, main_grad | [M / R, K], [N / R, K] | [M, K / R], [N, K / R] |
    """

    def __init__(
        self, case: Case, group: ProcessGroup, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.case, self.group, self.device = case, group, device
        self.column = case.spec.gathers
        pattern = (COLUMN if self.column else ROW).dual
        if case.pattern == "backward_ar":
            pattern = Pattern.GEMM_AR
        name = str(dtype).removeprefix("torch.")
        sizes = case.M, case.K, case.N
        self.dgrad = Problem(pattern, *sizes, name, case.world_size, "nn", device.type)
        M, N, K = case.M, case.N_local, case.K_local
        self.w = torch.randn(N, K, device=device, dtype=dtype, requires_grad=True)
        self.main_grad = torch.zeros(N, K, device=device)
        self.partial = torch.empty(M, K, device=device, dtype=dtype)  # what dgrad's GEMM gives
        self._draw(dtype)

    def _draw(self, dtype: torch.dtype) -> None:
        """x, dy, what is gathered of them, and the layer's y."""
        case, device, (N, K) = self.case, self.device, self.w.shape
        M, M_shard = case.M, case.M // case.world_size
        x_rows, dy_rows = (M_shard, M) if self.column else (M, M_shard)
        self.x = torch.randn(x_rows, K, device=device, dtype=dtype, requires_grad=True)
        self.dy = torch.randn(dy_rows, N, device=device, dtype=dtype)
        travels = self.x.detach() if self.column else self.dy
        self.gathered = travels.new_empty(M, travels.shape[1])
        dist.all_gather_into_tensor(self.gathered, travels, group=self.group)
        self.dx = travels.new_empty(M_shard, K)  # of the reduce-scatter
        self.y = self.forward()

    def forward(self) -> Tensor:
        """The layer's y, whose backward is measured."""
        options: dict[str, Any] = {"group": self.group, "wgrad": self._wgrad}
        if self.column:
            return functions.column_parallel_linear(self.x, self.w, None, **options)
        return functions.row_parallel_linear(self.x, self.w, **options)

    def _wgrad(self, w: Tensor, dy: Tensor, x: Tensor) -> None:
        accumulate_wgrad_by_torch(self.main_grad, dy, x)

    def reference(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """(dx, main_grad) of the operation and of a local candidate, in a wider dtype."""
        dy, x = (widened(t) for t in self._dy_and_x())
        local = reference.matmul(dy, widened(self.w), "nn")
        dw = reference.wgrad(dy, x)
        dx = expected(self.dgrad.pattern, self.dy, self.w, "nn", self.group)
        return (dx, dw), (local, dw)

    def _dy_and_x(self) -> tuple[Tensor, Tensor]:
        """All rows of both, the operands of wgrad."""
        return (self.dy, self.gathered) if self.column else (self.gathered, self.x.detach())

    def candidates(self) -> Iterator[Candidate]:
        yield Candidate("gemm", LIBRARY, self._gemms, local=True)
        yield Candidate("serial", LIBRARY, self._serial)
        yield Candidate("serial_again", LIBRARY, self._serial)
        yield Candidate("megatron", LIBRARY, self._megatron)
        for name, strategy in registry.STRATEGIES[self.dgrad.pattern].items():
            if reason := strategy.supports(self.dgrad):
                yield Candidate(name, OURS, None, reason)
            else:
                yield Candidate(name, OURS, with_strategy(name, self._autograd))
        plan_of = plan_of_auto(self.dgrad.pattern, self.dy, self.w.detach(), self.group, "nn")
        yield Candidate("auto", OURS, with_strategy("auto", self._autograd), plan=plan_of)

    def _gemms(self) -> tuple[Tensor, Tensor]:
        dy, x = self._dy_and_x()
        torch.mm(dy, self.w.detach(), out=self.partial)
        accumulate_wgrad_by_torch(self.main_grad, dy, x)
        return self.partial, self.main_grad

    def _serial(self) -> tuple[Tensor, Tensor]:
        """All collectives exposed."""
        return self._by_nccl(later=False)

    def _megatron(self) -> tuple[Tensor, Tensor]:
        """Gather a column layer's x beside dgrad, scatter dx beside wgrad."""
        return self._by_nccl(later=True)

    def _by_nccl(self, later: bool) -> tuple[Tensor, Tensor]:
        if not self.column:
            dist.all_gather_into_tensor(self.gathered, self.dy, group=self.group)
            return self._gemms()
        options: dict[str, Any] = {"group": self.group, "async_op": later}
        gather = dist.all_gather_into_tensor(self.gathered, self.x.detach(), **options)
        torch.mm(self.dy, self.w.detach(), out=self.partial)
        if later:
            gather.wait()
        scatter = dist.reduce_scatter_tensor(self.dx, self.partial, **options)
        accumulate_wgrad_by_torch(self.main_grad, self.dy, self.gathered)
        if later:
            scatter.wait()
        return self.dx, self.main_grad

    def _autograd(self) -> tuple[Tensor, Tensor]:
        dx, _ = torch.autograd.grad(
            self.y, (self.x, self.w), self.dy, retain_graph=True, allow_unused=True
        )
        return dx, self.main_grad


class AllReducedBackward(Backward):
    """Of a column layer without sequence parallelism: every rank has all tokens, x [M, K], and dx
    [M, K] is all-reduced. A row layer's backward needs no communication there.
    """

    def _draw(self, dtype: torch.dtype) -> None:
        (M, K), N, device = self.partial.shape, self.w.shape[0], self.device
        alike = torch.Generator(device).manual_seed(1)  # all ranks have the same tokens
        self.x = torch.randn(M, K, device=device, dtype=dtype, generator=alike).requires_grad_()
        self.dy = torch.randn(M, N, device=device, dtype=dtype)
        self.y = functions.local_linear(
            self.x, self.w, None, wgrad=self._wgrad, allreduce_group=self.group
        )

    def _dy_and_x(self) -> tuple[Tensor, Tensor]:
        return self.dy, self.x.detach()

    def _by_nccl(self, later: bool) -> tuple[Tensor, Tensor]:
        """`later`: sum dx beside wgrad."""
        torch.mm(self.dy, self.w.detach(), out=self.partial)
        total = dist.all_reduce(self.partial, group=self.group, async_op=later)
        accumulate_wgrad_by_torch(self.main_grad, *self._dy_and_x())
        if later:
            total.wait()
        return self.partial, self.main_grad
