"""The cases of a column layer's backward without sequence parallelism: every rank has all tokens,
and dx is all-reduced. A row layer's backward needs no communication there.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron.lab.bench.backward import Backward
from flux_megatron.lab.bench.candidates import Call
from flux_megatron.lab.bench.suites import Case
from flux_megatron.nn import all_reduced
from flux_megatron.problem import Pattern, Problem
from flux_megatron.wgrad import accumulate_wgrad_by_torch


class AllReducedBackward(Backward):
    """Operands of the backward on this rank, and the reference.

    | tensor | shape |
    | --- | --- |
    | x | [M, K] |
    | w, main_grad (fp32) | [N / R, K] |
    | dy | [M, N / R] |
    | reference: dx, main_grad | [M, K], [N / R, K] |
    """

    def __init__(
        self, case: Case, group: ProcessGroup, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.case, self.group, self.device, self.column = case, group, device, True
        M, N, K = case.M, case.N_local, case.K_local
        alike = torch.Generator(device).manual_seed(1)  # all ranks have the same tokens
        self.x = torch.randn(M, K, device=device, dtype=dtype, generator=alike).requires_grad_()
        self.w = torch.randn(N, K, device=device, dtype=dtype, requires_grad=True)
        self.dy = torch.randn(M, N, device=device, dtype=dtype)
        self.main_grad = torch.zeros(N, K, device=device)
        self.partial = self.dy.new_empty(M, K)  # what dgrad's GEMM gives, and its sum
        self.y = all_reduced.local_linear(
            self.x, self.w, None, wgrad=self._wgrad, allreduce_group=group
        )

    def _dy_and_x(self) -> tuple[Tensor, Tensor]:
        return self.dy, self.x.detach()

    def _schedules(self) -> tuple[Call, Call]:
        return self._serial, self._megatron

    def _serial(self) -> tuple[Tensor, Tensor]:
        torch.mm(self.dy, self.w.detach(), out=self.partial)
        dist.all_reduce(self.partial, group=self.group)
        accumulate_wgrad_by_torch(self.main_grad, *self._dy_and_x())
        return self.partial, self.main_grad

    def _megatron(self) -> tuple[Tensor, Tensor]:
        """Sum dx beside wgrad."""
        torch.mm(self.dy, self.w.detach(), out=self.partial)
        total = dist.all_reduce(self.partial, group=self.group, async_op=True)
        accumulate_wgrad_by_torch(self.main_grad, *self._dy_and_x())
        total.wait()
        return self.partial, self.main_grad

    def _dgrad_problem(self) -> Problem:
        case = self.case
        dtype = str(self.dy.dtype).removeprefix("torch.")
        return Problem(
            Pattern.GEMM_AR, case.M, case.K, case.N, dtype, case.world_size, "nn", self.device.type
        )
