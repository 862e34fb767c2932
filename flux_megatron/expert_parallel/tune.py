"""Measuring which strategy of experts is the fastest, as `tuning.tuner` does for linear layers.

Each rank gets `capacity` / R rows, as many from every rank for every expert. The gradient of the
weights is the same for all strategies, so only the operation itself is timed; `a2a_gemm` keeps its
rows for backward, as in training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron.expert_parallel import fused
from flux_megatron.expert_parallel.call import STRATEGIES
from flux_megatron.expert_parallel.plans import ExpertEntry, ExpertProblem
from flux_megatron.kernels.experts.call import header_bytes
from flux_megatron.kernels.experts.weights import ExpertWeights
from flux_megatron.problem import Plan
from flux_megatron.symm.workspace import Workspace
from flux_megatron.symm.workspaces import workspace
from flux_megatron.tuning import tuner
from flux_megatron.tuning.trial import AnyTrial

BANDS = (2, 8)  # of `signalled`, beside its own number


class Trial(AnyTrial[ExpertEntry]):
    """Operands of one problem on this rank."""

    entry = ExpertEntry
    problem: ExpertProblem

    def __init__(self, problem: ExpertProblem, group: ProcessGroup, device: torch.device) -> None:
        super().__init__(problem, group, device)
        ranks, groups = problem.world_size, problem.world_size * problem.experts
        self._rows = problem.capacity // ranks
        each, more = divmod(self._rows, groups)
        # the rows that are left go to other experts on each rank, so that no rank gets more
        numbers = (torch.arange(groups) - group.rank() * problem.experts) % groups
        counts = each + (numbers < more).to(torch.int32)
        self._counts = counts.to(device, torch.int32).view(ranks, problem.experts)
        N, K = problem.N, problem.K
        there = problem.operation == "a2a_gemm"
        self._x = self.random(self._rows if there else problem.capacity, K) / 8
        matrix = (N, K) if problem.layout == "nt" else (K, N)
        self._w = self.random(problem.experts, *matrix) / 8

    def reserve(self, space: Workspace) -> None:
        if space.unavailable:  # mailboxes will not do
            return
        columns, header = max(self.problem.N, self.problem.K), header_bytes(*self._counts.shape)
        size_bytes = header + self.problem.capacity * columns * self._x.element_size()
        for channel in (fused.DISPATCH, fused.COMBINE):
            space.end(space.begin(channel, size_bytes))

    def call(self, plan: Plan) -> Callable[[], Tensor]:
        strategy, p = STRATEGIES[plan.strategy], self.problem
        given, space = (self._x, ExpertWeights(self._w), self._counts), self._space
        if p.operation == "a2a_gemm":
            return lambda: strategy.a2a_gemm(*given, p.capacity, p.layout, True, plan, space)[0]
        return lambda: strategy.gemm_a2a(*given, self._rows, p.layout, plan, space)


def measure(
    problem: ExpertProblem, group: ProcessGroup, device: torch.device, rounds: int = tuner.ROUNDS
) -> ExpertEntry:
    """Time all strategies that can run; the same entry on every rank. Collective, as
    `tuner.measure`.
    """
    plans = candidates(problem, workspace(group, device))
    return tuner.measure(Trial, problem, plans, group, device, rounds=rounds)


def candidates(problem: ExpertProblem, space: Workspace) -> list[Plan]:
    """`sequential`, then what else can run here."""
    N, layout = problem.N, problem.layout
    x = torch.empty(0, problem.K, dtype=getattr(torch, problem.dtype), device=space.device)
    found = [
        strategy.default_plan(x, N)
        for name, strategy in STRATEGIES.items()
        if name != "sequential" and not strategy.supports(x, N, layout, space)
    ]
    bands = [replace(p, bands=n) for p in found if p.strategy == "signalled" for n in BANDS]
    return [Plan("sequential"), *found, *bands]
