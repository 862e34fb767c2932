"""From a call to its strategy: the checks that it passes before any rank could hang.

As `dispatch` does it for the patterns of tensor parallelism. What ranks must have in common is
asked once for each new kind of call; the number of a rank's rows is not among it.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron import settings
from flux_megatron.expert_parallel import fused, hopper, plans, sequential, signalled
from flux_megatron.kernels.expert_weights import ExpertWeights, lie_in_rows
from flux_megatron.overlap.operands import refuse_wrapper
from flux_megatron.overlap.report import note_call, note_fallback
from flux_megatron.problem import Plan
from flux_megatron.symm.workspace import Workspace, workspace

LAYOUTS = ("nt", "nn")


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


@dataclass(frozen=True)
class Decision:
    """What runs a kind of call, and why nothing overlaps, if a strategy that does was wanted."""

    operation: str
    strategy: Strategy
    plan: Plan
    space: Workspace
    fallback: str | None

    def report_fallback(self) -> None:
        """Before a call that does not overlap, if it was meant to: count it, or refuse it."""
        if self.fallback is not None:
            note_fallback(self.operation, self.fallback)

    def count(self) -> None:
        """Behind a call: it has been enqueued."""
        if self.fallback is None:
            note_call(self.operation, self.plan.strategy)


def decide(
    operation: str, x: Tensor, w: Tensor, counts: Tensor, group: ProcessGroup, rows: int,
    capacity: int, layout: str, plan: Plan | None,
) -> Decision:  # fmt: skip
    """Check the call, choose its strategy, and ask the other ranks once for each new kind.

    `rows` is what this rank sends, or gets back; `capacity` what no rank sends or receives more of.
    """
    space = workspace(group, x.device)
    space.check()  # before a question that a rank which has failed would not answer
    if error := _error(x, w, counts, space, rows, capacity, layout, plan):
        error = f"{operation}: {error}"
        space.agreement.refuse(error)
        raise ValueError(error)
    wanted = settings.get()
    key = (operation, w.shape, w.dtype, capacity, layout, plan, wanted)
    words = f"{operation} {_sizes(w)} {layout} capacity {capacity}"
    if key not in space.decisions:
        with space.guard():
            if plan is None and wanted.strategy == "auto" and space.world_size > 1:
                plan = _kept(operation, x, w, capacity, layout, space)
            decision = _choose(operation, x, w, layout, plan, space)
        space.agreement.confirm(f"{words} with {decision.plan.dumps()}")
        space.decisions[key] = decision
    space.note(words)
    found: Decision = space.decisions[key]
    return found


def refuse_wrappers(operation: str, group: ProcessGroup, **operands: Tensor) -> None:
    """`ValueError`, and the reason for the other ranks, for tensors that stand for others."""
    try:
        for name, tensor in operands.items():
            refuse_wrapper(name, tensor)
    except ValueError as error:
        workspace(group, tensor.device).agreement.refuse(f"{operation}: {error}")
        raise ValueError(f"{operation}: {error}") from None


def _kept(
    operation: str, x: Tensor, w: Tensor, capacity: int, layout: str, space: Workspace
) -> Plan | None:
    """The measured plan of the group's leader, where all that it needs is here."""
    N, K = w.shape[1:] if layout == "nt" else (w.shape[2], w.shape[1])
    dtype = str(x.dtype).removeprefix("torch.")
    problem = plans.ExpertProblem(
        operation, capacity, len(w), N, K, dtype, space.world_size, layout, x.device.type
    )
    plan = plans.agreed(problem, space)
    known = plan is not None and _refusal(operation, plan.strategy, x, N, layout, space) is None
    return plan if known else None


def _choose(
    operation: str, x: Tensor, w: Tensor, layout: str, plan: Plan | None, space: Workspace
) -> Decision:
    N = w.shape[1] if layout == "nt" else w.shape[2]
    wanted = plan.strategy if plan is not None else settings.get().strategy
    names = [*STRATEGIES][:-1] if wanted == "auto" else [wanted]
    reasons = {name: _refusal(operation, name, x, N, layout, space) for name in names}
    name = next((name for name in names if reasons[name] is None), "sequential")
    reason = reasons[names[-1]] if name == "sequential" else None  # of the one that needs least
    if reason is not None and plan is not None:
        error = f"{operation}: the plan {plan.dumps()} cannot run: {reason}"
        space.agreement.refuse(error)
        raise ValueError(error)
    if name == "fused" and (why := reasons.get("hopper")) and _on_hopper(x):
        warnings.warn(f"flux_megatron: {operation} runs the portable kernels: {why}", stacklevel=2)
    strategy = STRATEGIES[name]
    return Decision(operation, strategy, plan or strategy.default_plan(x, N), space, reason)


def _on_hopper(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 9


def _refusal(
    operation: str, name: str, x: Tensor, N: int, layout: str, space: Workspace
) -> str | None:
    """Why a strategy cannot run the call, or None."""
    if name not in STRATEGIES:
        return f"{name} is not built for {operation}"
    return STRATEGIES[name].supports(x, N, layout, space)


def _error(
    x: Tensor, w: Tensor, counts: Tensor, space: Workspace, rows: int, capacity: int, layout: str,
    plan: Plan | None,
) -> str | None:  # fmt: skip
    """What is wrong with the arguments of this rank: what was given and what was expected."""
    if layout not in LAYOUTS:
        return f"layout {layout!r} given, one of {LAYOUTS} expected"
    if plan is not None and plan.strategy not in STRATEGIES:
        return f"strategy {plan.strategy!r} given, one of {[*STRATEGIES]} expected"
    if x.dim() != 2 or w.dim() != 3:
        return f"x {_sizes(x)} and w {_sizes(w)} given, a matrix and one for each expert expected"
    if not x.dtype.is_floating_point or w.dtype != x.dtype:
        return f"x {_sizes(x)} and w {_sizes(w)} given, one floating-point dtype expected"
    if not x.device == w.device == counts.device == space.device:
        devices = f"x on {x.device}, w on {w.device}, counts on {counts.device}"
        return f"{devices} given, {space.device} expected"
    if not (x.is_contiguous() and counts.is_contiguous()):
        return "x or counts with gaps given, contiguous ones expected"
    if counts.dtype != torch.int32 or counts.shape != (space.world_size, w.shape[0]):
        return f"counts {_sizes(counts)} given, [{space.world_size}, {w.shape[0]}] int32 expected"
    if x.shape[1] != (w.shape[2] if layout == "nt" else w.shape[1]):
        return f"x {_sizes(x)} and w {_sizes(w)} given, equal K expected for layout {layout!r}"
    if 0 in w.shape:
        return f"w {_sizes(w)} given, no empty dimension expected"
    if not lie_in_rows(w):
        strides = f"w {_sizes(w)} with strides {list(w.stride())}"
        return f"{strides} given, matrices of contiguous rows, whole rows apart, expected"
    if not 0 < capacity < 2**31 or not 0 <= rows <= capacity:
        return f"{rows} rows and capacity {capacity} given, at most capacity rows expected"
    return None


def _sizes(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
