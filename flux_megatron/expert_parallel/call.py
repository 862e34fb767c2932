"""From a call to its strategy: the checks that it passes before any rank could hang.

As `dispatch` does it for the patterns of tensor parallelism, with what they share. What ranks must
have in common is asked once for each new kind of call; the number of a rank's rows is not among it.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron import settings
from flux_megatron.dispatch import Choice, refuse
from flux_megatron.expert_parallel import fused, hopper, sequential, signalled
from flux_megatron.kernels.experts.weights import ExpertWeights, lie_in_rows
from flux_megatron.overlap.operands import operands_error
from flux_megatron.problem import Plan
from flux_megatron.symm.workspace import Workspace
from flux_megatron.symm.workspaces import workspace


class Strategy(Protocol):
    """How both operations overlap: a module of this folder."""

    def supports(self, x: Tensor, N: int, layout: str, space: Workspace) -> str | None: ...

    def default_plan(self, x: Tensor, N: int) -> Plan: ...

    def a2a_gemm(
        self, x: Tensor, w: ExpertWeights, counts: Tensor, capacity: int, layout: str, keep: bool,
        plan: Plan, space: Workspace,
    ) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip

    def gemm_a2a(
        self, x: Tensor, w: ExpertWeights, counts: Tensor, tokens: int, layout: str, plan: Plan,
        space: Workspace,
    ) -> Tensor: ...  # fmt: skip


# in order of preference; the last is always possible
STRATEGIES: dict[str, Strategy] = {
    "hopper": hopper, "fused": fused, "signalled": signalled, "sequential": sequential,
}  # fmt: skip


def decide(
    operation: str, x: Tensor, w: Tensor, counts: Tensor, group: ProcessGroup, rows: int,
    capacity: int, layout: str, plan: Plan | None,
) -> Choice[Strategy]:  # fmt: skip
    """Check the call, choose its strategy, and ask the other ranks once for each new kind.

    `rows` is what this rank sends, or gets back; `capacity` what no rank sends or receives more of.
    """
    space = workspace(group, x.device)
    space.check()  # before a question that a rank which has failed would not answer
    if error := _error(x, w, counts, space, rows, capacity, layout, plan):
        refuse(f"{operation}: {error}", group, x.device)
    key = (operation, w.shape, w.dtype, capacity, layout, plan, settings.get())
    if key not in space.agreed:
        with space.guard():
            space.agreed[key] = _agreed(operation, x, w, capacity, layout, plan, space)
    choice: Choice[Strategy] = space.agreed[key]
    if choice.workspace is not space:  # it was agreed on before a `release`
        choice = space.agreed[key] = replace(choice, workspace=space)
    space.note(choice.description)
    return choice


def most_tokens(tokens: int, group: ProcessGroup, device: torch.device) -> int:
    """What stands for this rank's number of tokens in what all ranks must have in common: as many,
    or what FLUX_MEGATRON_EXPERT_TOKENS says.
    """
    most = settings.get().expert_tokens or tokens
    if tokens > most:
        error = f"{tokens} tokens given, FLUX_MEGATRON_EXPERT_TOKENS={most} at most expected"
        refuse(f"experts: {error}", group, device)
    return most


def _agreed(
    operation: str, x: Tensor, w: Tensor, capacity: int, layout: str, plan: Plan | None,
    space: Workspace,
) -> Choice[Strategy]:  # fmt: skip
    """The choice of all ranks. Collective."""
    N, K = w.shape[1:] if layout == "nt" else (w.shape[2], w.shape[1])
    dtype = str(x.dtype).removeprefix("torch.")
    problem = ExpertProblem(
        operation, capacity, len(w), N, K, dtype, space.world_size, layout, x.device.type
    )
    choice = _choose(problem, x, plan, space)
    space.agreement.confirm(choice.description)
    return choice


@dataclass(frozen=True)
class ExpertProblem:
    """What ranks have in common of a call.

    `operation` is "a2a_gemm" or "gemm_a2a", for layout "nn" as dgrad of the other one. A rank has
    `experts` of K columns in and N out, and gets `capacity` rows at most.
    """

    operation: str
    capacity: int
    experts: int
    N: int
    K: int
    dtype: str
    world_size: int
    layout: str = "nt"
    device: str = "cuda"

    def __str__(self) -> str:
        return (
            f"{self.operation} capacity {self.capacity} E={self.experts} N={self.N} K={self.K} "
            f"{self.layout} {self.dtype} over {self.world_size} ranks on {self.device}"
        )


def _choose(
    problem: ExpertProblem, x: Tensor, plan: Plan | None, space: Workspace
) -> Choice[Strategy]:
    operation = problem.operation
    wanted = plan.strategy if plan is not None else settings.get().strategy
    names = [*STRATEGIES][:-1] if wanted == "auto" else [wanted]
    reasons = {name: _refusal(problem, name, x, space) for name in names}
    name = next((name for name in names if reasons[name] is None), "sequential")
    reason = reasons[names[-1]] if name == "sequential" else None  # of the one that needs least
    if reason is not None and plan is not None:
        error = f"{operation}: the plan {plan.dumps()} cannot run: {reason}"
        refuse(error, space.group, space.device)
    if name == "fused" and (why := reasons.get("hopper")) and _on_hopper(x):
        warnings.warn(f"flux_megatron: {operation} runs the portable kernels: {why}", stacklevel=2)
    strategy = STRATEGIES[name]
    plan = plan or strategy.default_plan(x, problem.N)
    return Choice(operation, strategy, plan, space, reason, f"{problem} with {plan.dumps()}")


def _on_hopper(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 9


def _refusal(problem: ExpertProblem, name: str, x: Tensor, space: Workspace) -> str | None:
    """Why a strategy cannot run the call, or None."""
    if name not in STRATEGIES:
        return f"{name} is not built for {problem.operation}"
    return STRATEGIES[name].supports(x, problem.N, problem.layout, space)


def _error(
    x: Tensor, w: Tensor, counts: Tensor, space: Workspace, rows: int, capacity: int, layout: str,
    plan: Plan | None,
) -> str | None:  # fmt: skip
    """What is wrong with the arguments of this rank: what was given and what was expected."""
    if error := operands_error(x, w, 3, layout, plan, STRATEGIES, space):
        return error
    if counts.device != space.device:
        return f"counts on {counts.device} given, {space.device} expected"
    if counts.dtype != torch.int32 or counts.shape != (space.world_size, len(w)):
        return f"counts {_sizes(counts)} given, [{space.world_size}, {len(w)}] int32 expected"
    if not (x.is_contiguous() and counts.is_contiguous()):
        return "x or counts with gaps given, contiguous ones expected"
    if not lie_in_rows(w):
        strides = f"w {_sizes(w)} with strides {list(w.stride())}"
        return f"{strides} given, matrices of contiguous rows, whole rows apart, expected"
    if not 0 < capacity < 2**31 or not 0 <= rows <= capacity:
        return f"{rows} rows and capacity {capacity} given, at most capacity rows expected"
    return None


def _sizes(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
