"""Measuring which strategy of experts is the fastest, as `tuning.tuner` does for linear layers.

Each rank gets `capacity` / R rows, as many from every rank for every expert. The gradient of the
weights is the same for all strategies, so only the operation itself is timed; `a2a_gemm` keeps its
rows for backward, as in training.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron.expert_parallel import fused, plans
from flux_megatron.expert_parallel.call import STRATEGIES
from flux_megatron.expert_parallel.plans import ExpertEntry, ExpertProblem
from flux_megatron.kernels.expert_routes import header_bytes
from flux_megatron.kernels.expert_weights import ExpertWeights
from flux_megatron.problem import Plan
from flux_megatron.symm.workspace import Workspace
from flux_megatron.tuning import tuner
from flux_megatron.tuning.plan_entry import Failed
from flux_megatron.tuning.timing import race
from flux_megatron.tuning.trial import TOLERANCE

PLAIN = Plan("sequential")
BANDS = (2, 8)  # of `signalled`, beside its own number


class Trial:
    """Operands of one problem on this rank; `renew` it before anything else.

    Calls run in a workspace of the trial's own: a plan that fails may leave it unusable.
    """

    def __init__(self, problem: ExpertProblem, group: ProcessGroup, device: torch.device) -> None:
        self.problem, self._group, self._device = problem, group, device
        made = torch.Generator(device).manual_seed(1 + group.rank())
        dtype = getattr(torch, problem.dtype)
        ranks, groups = problem.world_size, problem.world_size * problem.experts
        self._rows = problem.capacity // ranks
        each, more = divmod(self._rows, groups)
        # the rows that are left go to other experts on each rank, so that no rank gets more
        numbers = (torch.arange(groups) - group.rank() * problem.experts) % groups
        counts = each + (numbers < more).to(torch.int32)
        self._counts = counts.to(device, torch.int32).view(ranks, problem.experts)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=dtype, device=device, generator=made) / 8

        N, K = problem.N, problem.K
        there = problem.operation == "a2a_gemm"
        self._x = random(self._rows if there else problem.capacity, K)
        self._w = random(problem.experts, *((N, K) if problem.layout == "nt" else (K, N)))

    def renew(self) -> None:
        """Take a new workspace, large enough for every call. Collective."""
        self._space = Workspace(self._group, self._device)
        if self._space.unavailable is None:
            columns, header = max(self.problem.N, self.problem.K), header_bytes(*self._counts.shape)
            size_bytes = header + self.problem.capacity * columns * self._x.element_size()
            for channel in (fused.DISPATCH, fused.COMBINE):
                self._space.end(self._space.begin(channel, size_bytes))

    def candidates(self) -> list[Plan]:
        """`sequential`, then what else can run here."""
        N, layout = self.problem.N, self.problem.layout
        found = [
            strategy.default_plan(self._x, N)
            for name, strategy in STRATEGIES.items()
            if name != "sequential" and not strategy.supports(self._x, N, layout, self._space)
        ]
        bands = [replace(p, splits=n) for p in found if p.strategy == "signalled" for n in BANDS]
        return [PLAIN, *found, *bands]

    def call(self, plan: Plan) -> Callable[[], Tensor]:
        strategy, p = STRATEGIES[plan.strategy], self.problem
        given, space = (self._x, ExpertWeights(self._w), self._counts), self._space
        if p.operation == "a2a_gemm":
            return lambda: strategy.a2a_gemm(*given, p.capacity, p.layout, True, plan, space)[0]
        return lambda: strategy.gemm_a2a(*given, self._rows, p.layout, plan, space)

    def verified(self, plan: Plan, expected: Tensor) -> Callable[[], None]:
        """`call`, compared with what `sequential` gives; `ArithmeticError` where it differs."""

        def check() -> None:
            y = self.call(plan)()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._space.check()
            limit = TOLERANCE * expected.float().square().mean().sqrt()
            error = (y.float() - expected.float()).abs().max()
            if not error <= limit:  # NaN too
                raise ArithmeticError(f"y differs by up to {error:.3g}, less than {limit:.3g}")

        return check


def measure(
    problem: ExpertProblem, group: ProcessGroup, device: torch.device, rounds: int = tuner.ROUNDS
) -> ExpertEntry | None:
    """Time all strategies that can run; the same entry on every rank. Collective.

    A plan that fails on one rank is out on all. `sequential` keeps its place unless another one
    beats it by more than its noise. None if there is no memory for the operands on some rank, or
    `sequential` fails.
    """
    trial = _trial(problem, group, device)
    if trial is None:
        return None
    trial.renew()
    expected = trial.call(PLAIN)()
    running: list[Plan] = []
    failed: list[Failed] = []
    candidates = trial.candidates()
    for plan in candidates:
        tried = race(
            {"": trial.verified(plan, expected)}, group=group, device=device, rounds=1, warmup=1
        )
        if tried.failures:
            failed.append(Failed(plan, tried.failures[""]))
            trial.renew()
        else:
            running.append(plan)
    calls = {plan.dumps(): trial.call(plan) for plan in running}
    calls[tuner.AGAIN] = trial.call(PLAIN)
    found = race(calls, group=group, device=device, rounds=rounds)
    if {PLAIN.dumps(), tuner.AGAIN} & found.failures.keys() or PLAIN not in running:
        return None
    failed += [Failed(Plan.loads(text), why) for text, why in found.failures.items()]
    winner, noise_us = tuner.settle(found.times_us, PLAIN)
    entry = tuner.entry_of(
        ExpertEntry, problem, plans.here(device, winner), candidates, failed, found.times_us,
        rounds, (winner, noise_us),
    )  # fmt: skip
    return ExpertEntry.loads(tuner.leaders(group, entry.dumps()))


def _trial(problem: ExpertProblem, group: ProcessGroup, device: torch.device) -> Trial | None:
    """None on all ranks if one has no room for the operands."""
    trial = None
    with suppress(torch.OutOfMemoryError):
        trial = Trial(problem, group, device)
    rooms = [False] * group.size()
    dist.all_gather_object(rooms, trial is not None, group=group)
    return trial if all(rooms) else None
