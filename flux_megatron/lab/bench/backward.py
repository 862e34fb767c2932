"""The cases of a layer's whole backward: its communication, dgrad, and wgrad into main_grad."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron import reference
from flux_megatron.lab.bench import expected
from flux_megatron.lab.bench.candidates import Call, Candidate, plan_of_auto, with_strategy
from flux_megatron.lab.bench.records import LIBRARY, OURS
from flux_megatron.lab.bench.suites import Case
from flux_megatron.nn import functions
from flux_megatron.overlap import registry
from flux_megatron.patterns import COLUMN, ROW
from flux_megatron.problem import Problem
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
        M, N, K, M_shard = case.M, case.N_local, case.K_local, case.M // case.world_size
        x_rows, dy_rows = (M_shard, M) if self.column else (M, M_shard)
        self.x = torch.randn(x_rows, K, device=device, dtype=dtype, requires_grad=True)
        self.w = torch.randn(N, K, device=device, dtype=dtype, requires_grad=True)
        self.dy = torch.randn(dy_rows, N, device=device, dtype=dtype)
        self.main_grad = torch.zeros(N, K, device=device)
        travels = self.x.detach() if self.column else self.dy
        self.gathered = travels.new_empty(M, travels.shape[1])
        dist.all_gather_into_tensor(self.gathered, travels, group=group)
        self.partial = travels.new_empty(M, K)  # what dgrad's GEMM gives
        self.dx = travels.new_empty(M_shard, K)  # of the reduce-scatter
        column, row = functions.column_parallel_linear, functions.row_parallel_linear
        self.y = (
            column(self.x, self.w, None, group=group, wgrad=self._wgrad)
            if self.column
            else row(self.x, self.w, group=group, wgrad=self._wgrad)
        )

    def _wgrad(self, w: Tensor, dy: Tensor, x: Tensor) -> None:
        accumulate_wgrad_by_torch(self.main_grad, dy, x)

    def reference(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """(dx, main_grad) of the operation and of a local candidate, in a wider dtype."""
        dy, x = (expected.widened(t) for t in self._dy_and_x())
        local = reference.matmul(dy, expected.widened(self.w), "nn")
        dw = reference.wgrad(dy, x)
        pattern = self._dgrad_problem().pattern
        dx = expected.of_pattern(pattern, self.dy, self.w, "nn", self.group)
        return (dx, dw), (local, dw)

    def _dy_and_x(self) -> tuple[Tensor, Tensor]:
        """All rows of both, the operands of wgrad."""
        return (self.dy, self.gathered) if self.column else (self.gathered, self.x.detach())

    def candidates(self) -> Iterator[Candidate]:
        serial, megatron = self._schedules()
        yield Candidate("gemm", LIBRARY, self._gemms, local=True)
        yield Candidate("serial", LIBRARY, serial)
        yield Candidate("serial_again", LIBRARY, serial)
        yield Candidate("megatron", LIBRARY, megatron)
        yield from self._ours()

    def _schedules(self) -> tuple[Call, Call]:
        """The layer with every collective exposed, and as Megatron runs it."""
        if self.column:
            return self._serial_column, self._megatron_column
        return self._serial_row, self._serial_row

    def _gemms(self) -> tuple[Tensor, Tensor]:
        dy, x = self._dy_and_x()
        torch.mm(dy, self.w.detach(), out=self.partial)
        accumulate_wgrad_by_torch(self.main_grad, dy, x)
        return self.partial, self.main_grad

    def _serial_row(self) -> tuple[Tensor, Tensor]:
        """All collectives exposed, as in Megatron's row layer."""
        dist.all_gather_into_tensor(self.gathered, self.dy, group=self.group)
        return self._gemms()

    def _serial_column(self) -> tuple[Tensor, Tensor]:
        dist.all_gather_into_tensor(self.gathered, self.x.detach(), group=self.group)
        torch.mm(self.dy, self.w.detach(), out=self.partial)
        dist.reduce_scatter_tensor(self.dx, self.partial, group=self.group)
        accumulate_wgrad_by_torch(self.main_grad, self.dy, self.gathered)
        return self.dx, self.main_grad

    def _megatron_column(self) -> tuple[Tensor, Tensor]:
        """Gather x beside dgrad, scatter dx beside wgrad."""
        gather = dist.all_gather_into_tensor(
            self.gathered, self.x.detach(), group=self.group, async_op=True
        )
        torch.mm(self.dy, self.w.detach(), out=self.partial)
        gather.wait()
        scatter = dist.reduce_scatter_tensor(self.dx, self.partial, group=self.group, async_op=True)
        accumulate_wgrad_by_torch(self.main_grad, self.dy, self.gathered)
        scatter.wait()
        return self.dx, self.main_grad

    def _ours(self) -> Iterator[Candidate]:
        problem = self._dgrad_problem()
        for name, strategy in registry.STRATEGIES[problem.pattern].items():
            if reason := strategy.supports(problem):
                yield Candidate(name, OURS, None, reason)
            else:
                yield Candidate(name, OURS, with_strategy(name, self._autograd))
        plan_of = plan_of_auto(problem.pattern, self.dy, self.w.detach(), self.group, "nn")
        yield Candidate("auto", OURS, with_strategy("auto", self._autograd), plan=plan_of)

    def _autograd(self) -> tuple[Tensor, Tensor]:
        dx, _ = torch.autograd.grad(
            self.y, (self.x, self.w), self.dy, retain_graph=True, allow_unused=True
        )
        return dx, self.main_grad

    def _dgrad_problem(self) -> Problem:
        case = self.case
        pattern = (COLUMN if self.column else ROW).dual
        dtype = str(self.dy.dtype).removeprefix("torch.")
        return Problem(
            pattern, case.M, case.K, case.N, dtype, case.world_size, "nn", self.device.type
        )
