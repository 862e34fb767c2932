"""The cases of one GEMM: AG+GEMM, GEMM+RS and GEMM+AR."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron import ops
from flux_megatron.kernels.hopper.config import wide_tile
from flux_megatron.lab import reference
from flux_megatron.lab.bench.candidates import (
    Call,
    Candidate,
    expected,
    plan_of_auto,
    widened,
    with_strategy,
)
from flux_megatron.lab.bench.records import LIBRARY, OURS
from flux_megatron.lab.bench.suites import Case
from flux_megatron.overlap import registry
from flux_megatron.patterns import COLUMN, Pattern
from flux_megatron.problem import Problem
from flux_megatron.symm.workspaces import workspace
from flux_megatron.tune_command.measure import label
from flux_megatron.tuning import tuner


class Forward:
    """Operands of a case on this rank, and the reference.

    | tensor | ag_gemm | gemm_rs |
    | --- | --- | --- |
    | x | [M / R, K] | [M, K / R] |
    | w, "nt" (transposed for "nn") | [N / R, K] | [N, K / R] |
    | gathered | [M, K] | x |
    | reference | [M, N / R] | [M / R, N] |
    """

    def __init__(
        self, case: Case, group: ProcessGroup, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.case, self.group, self.device = case, group, device
        M, N, K = case.M, case.N_local, case.K_local
        gathers = case.spec.gathers
        rows = M // case.world_size if gathers else M
        self.x = torch.randn(rows, K, device=device, dtype=dtype)
        shape = (N, K) if case.layout == "nt" else (K, N)
        self.w = torch.randn(shape, device=device, dtype=dtype)
        self.right = self.w.t() if case.layout == "nt" else self.w
        self.gathered = self.x
        if gathers:
            self.gathered = self.x.new_empty(M, K)
            dist.all_gather_into_tensor(self.gathered, self.x, group=group)
        self.partial = self.x.new_empty(M, N)
        self.y = self.x.new_empty(M // case.world_size, N)  # of the reduce-scatter

    def reference(self) -> tuple[tuple[Tensor], tuple[Tensor]]:
        """The result of the operation and that of a local candidate, in a wider dtype."""
        x, w, layout = self.gathered, self.w, self.case.layout
        local = reference.matmul(widened(x), widened(w), layout)
        y = expected(Pattern(self.case.pattern), self.x, w, layout, self.group)
        return (y,), (local,)

    def candidates(self) -> Iterator[Candidate]:
        yield Candidate("gemm", LIBRARY, self._gemm, local=True)
        yield Candidate("ours_gemm", OURS, *self._local_kernel(), local=True)
        yield Candidate("serial", LIBRARY, self._serial)
        yield Candidate("serial_again", LIBRARY, self._serial)
        pattern, layout = Pattern(self.case.pattern), self.case.layout
        problem, operands = self._problem(pattern), (self.x, self.w, self.group)
        op = partial(ops.OPERATIONS[pattern], *operands, layout=layout)
        for name, strategy in registry.STRATEGIES[pattern].items():
            if reason := strategy.supports(problem):
                yield Candidate(name, OURS, None, reason)
                continue
            plan = strategy.default_plan(problem)
            yield Candidate(name, OURS, with_strategy("auto", op, plan=plan), plan=plan.dumps)
        plan_of = plan_of_auto(pattern, *operands, layout)
        yield Candidate("auto", OURS, with_strategy("auto", op), plan=plan_of)

    def all_plans(self) -> Iterator[Candidate]:
        """Those that `flux-megatron tune` measures."""
        pattern, layout = Pattern(self.case.pattern), self.case.layout
        problem = self._problem(pattern)
        op = partial(ops.OPERATIONS[pattern], self.x, self.w, self.group, layout=layout)
        missing = workspace(self.group, self.device).missing
        names = [*registry.runnable(problem, "auto", missing)]
        for plan in tuner.candidates(problem, names, missing):
            call = with_strategy("auto", op, plan=plan)
            yield Candidate(label(plan), OURS, call, plan=plan.dumps)

    def _gemm(self) -> tuple[Tensor]:
        return (torch.mm(self.gathered, self.right, out=self.partial),)

    def _serial(self) -> tuple[Tensor]:
        """NCCL's collective in front of the GEMM, or behind it."""
        if self.case.spec.gathers:
            dist.all_gather_into_tensor(self.gathered, self.x, group=self.group)
        result = self._gemm()
        if self.case.spec.scatters:
            dist.reduce_scatter_tensor(self.y, *result, group=self.group)
            return (self.y,)
        if self.case.spec.reduces:
            dist.all_reduce(*result, group=self.group)
        return result

    def _local_kernel(self) -> tuple[Call | None, str]:
        """Our GEMM without communication, or the reason why it cannot run."""
        try:
            from flux_megatron.kernels.hopper import ag_gemm as hopper_ag_gemm
            from flux_megatron.kernels.hopper import gemm as hopper_gemm
        except ImportError as error:
            return None, str(error)
        x, w, layout = self.gathered, self.w, self.case.layout
        alone = replace(self._problem(COLUMN), N=self.case.N_local, world_size=1)
        if reason := hopper_gemm.supports(replace(alone, K=self.case.K_local)):
            return None, reason
        tile = wide_tile(len(x), self.case.N_local, self.case.K_local)
        return lambda: (hopper_ag_gemm.gemm(x, w, layout, tile),), ""

    def _problem(self, pattern: Pattern) -> Problem:
        case, dtype = self.case, str(self.x.dtype).removeprefix("torch.")
        sizes = case.M, case.N, case.K
        return Problem(pattern, *sizes, dtype, case.world_size, case.layout, self.device.type)
