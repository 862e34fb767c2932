"""From a call to its plan: the checks that every call passes before any rank could hang.

The first call of a layer kind is confirmed with the other ranks. The first of each shape is checked
on its rank and gets its plan. Each later one costs a look-up and an entry in the log of calls.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron import settings
from flux_megatron.overlap import calls, registry
from flux_megatron.overlap.operands import (
    dense,
    is_plain,
    linear_error,
    local,
    memory,
    no_rows,
    refuse_forward_mode,
    refuse_wrapper,
    rows_error,
)
from flux_megatron.overlap.report import note_call, note_fallback
from flux_megatron.problem import Pattern, Plan, Problem
from flux_megatron.scaling import Scaling
from flux_megatron.symm.groups import name_of
from flux_megatron.symm.program import CallProgram
from flux_megatron.symm.workspace import Guard, Workspace
from flux_megatron.symm.workspaces import workspace
from flux_megatron.tuning import choice

S = TypeVar("S")


@dataclass(frozen=True)
class Choice(Generic[S]):
    """What runs a kind of call, and why it does not overlap, if it was meant to."""

    operation: str
    strategy: S
    plan: Plan
    workspace: Workspace
    fallback: str | None
    description: str

    def report_fallback(self) -> None:
        """Before a call that does not overlap, if it was meant to: count it, or refuse it."""
        if self.fallback is not None:
            note_fallback(self.operation, self.fallback)

    def count(self) -> None:
        """Behind a call: it has been enqueued."""
        if self.fallback is None:
            note_call(self.operation, self.plan.strategy)


@dataclass(frozen=True)
class Decision(Choice[registry.Strategy]):
    problem: Problem
    _programs: dict[bool, CallProgram] = field(default_factory=dict)

    def program(
        self, x: Tensor, w: Tensor, bias: Tensor | None, caller_steps: bool,
        scaling: Scaling | None,
    ) -> CallProgram:  # fmt: skip
        """That of these calls: their shapes were compared when this decision was found."""
        program = self._programs.get(caller_steps)
        if program is None:
            build = self.strategy.BUILDERS[self.problem.pattern]
            program = calls.program_of(
                build, x, w, bias, self.problem.layout, self.plan, self.workspace, caller_steps,
                scaling,
            )  # fmt: skip
            self._programs[caller_steps] = program
        return program


def decide(
    pattern: Pattern, x: Tensor, w: Tensor, bias: Tensor | None, group: ProcessGroup,
    layout: str, plan: Plan | None, scaling: Scaling | None = None,
) -> Decision:  # fmt: skip
    """Check the call, choose its plan, and confirm each new layer kind with the other ranks."""
    space = entered(group, x.device)
    # everything that the checks read; that operands are dense `overlap.operands` has seen to
    kind = (
        pattern, layout, plan, x.shape[1:], x.dtype, x.device, w.shape, w.dtype, w.device,
        None if bias is None else (bias.shape, bias.dtype, bias.device),
        None if scaling is None else scaling.facts,
    )  # fmt: skip
    decision = space.checked.get((x.shape[:1], kind))
    if decision is None:
        with space.guard():  # measuring makes calls
            # blockwise scales are of rows
            blockwise = scaling is not None and scaling.blockwise
            known: Kind | None = None if blockwise else space.kinds.get(kind)
            if error := (
                rows_error(pattern, x, space) if known else
                linear_error(
                    pattern, x, w, bias, space, layout, plan, registry.STRATEGIES[pattern], scaling
                )
            ):  # fmt: skip
                refuse(f"{pattern}: {error}", space.group, x.device)
            if known is None:
                known = space.kinds[kind] = _new_kind(pattern, x, w, layout, plan, space, scaling)
            decision = _new_decision(known, len(x), plan, space)
        space.checked[x.shape[:1], kind] = decision
    space.note(decision.description)
    return decision


def decide_sum(
    pattern: Pattern, x: Tensor, w: Tensor, group: ProcessGroup, layout: str, plan: Plan | None,
    scaling: Scaling | None,
) -> tuple[Decision, Scaling | None]:  # fmt: skip
    """Which program sums x @ w over the ranks; the scales as it takes them."""
    if scaling and settings.get().fp8_wire:
        scaling = scaling._replace(wire=True)
    decision = decide(pattern, x, w, None, group, layout, plan, scaling)
    decision.report_fallback()
    return decision, dense(scaling, decision.workspace)


def entered(group: ProcessGroup, device: torch.device) -> Workspace:
    """Where a call is made. What has failed is raised, and other settings forget all plans."""
    space = workspace(group, device)
    space.check()  # before a question: a rank that has failed would not answer
    if space.settings is not (now := settings.get()):
        space.settings = now
        for known in (space.kinds, space.checked, space.programs):
            known.clear()
    return space


def agreed_empty(pattern: Pattern, x: Tensor, w: Tensor, group: ProcessGroup, layout: str) -> bool:
    """Whether x has no rows. If so nobody computes, but the ranks agree on the call and log it as
    any other. `decide` reports what else is wrong.
    """
    if not no_rows(x, w, layout):
        return False
    space = entered(group, x.device)
    problem = _problem(pattern, x, w, space, layout)
    space.note_agreed(str(problem))
    return True


def gather_refused(group: ProcessGroup, device: torch.device) -> str | None:
    """Why copy engines cannot gather without a plan (`pieces.start_gather_beside`), or None."""
    space, wanted = workspace(group, device), settings.get().strategy
    if wanted != "auto" and not registry.STRATEGIES[Pattern.AG_GEMM][wanted].NEEDS_SYMMETRIC_MEMORY:
        return f"{wanted} is wanted"
    return None if space.mailboxes else space.unavailable


def refuse(error: str, group: ProcessGroup, device: torch.device) -> NoReturn:
    """Raise `ValueError`, and report the reason to the other ranks."""
    workspace(group, device).agreement.refuse(error)
    raise ValueError(error)


def refuse_wrappers(operation: str, group: ProcessGroup, **operands: Tensor) -> None:
    """Refuse tensors that stand for others, also in forward mode."""
    refuse_forward_mode(operation)
    for name, tensor in operands.items():
        try:
            refuse_wrapper(name, tensor)
        except ValueError as error:  # noqa: PERF203, the tensor has the group's device
            refuse(f"{operation}: {error}", group, tensor.device)


def local_shards(
    pattern: Pattern, x: Tensor, w: Tensor, bias: Tensor | None, group: ProcessGroup, layout: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands, of DTensors what this rank has. Differentiable; refuses other placements."""
    if is_plain(x) and is_plain(w) and (bias is None or is_plain(bias)):
        return x, w, bias
    name = name_of(group)
    gathers = pattern.spec.gathers
    try:
        x = local("x", x, 0 if gathers else -1, name)
        w = local("w", w, 0 if gathers == (layout == "nt") else 1, name)
        bias = bias if bias is None else local("bias", bias, 0, name)
    except ValueError as error:
        refuse(f"{pattern}: {error}", group, x.device)
    return x, w, bias


def in_memory(
    pattern: Pattern, x: Tensor, w: Tensor, bias: Tensor | None, group: ProcessGroup
) -> tuple[Tensor, Tensor, Tensor | None]:
    try:
        return memory("x", x), memory("w", w), bias if bias is None else memory("bias", bias)
    except ValueError as error:
        refuse(f"{pattern}: {error}", group, x.device)


def guard(group: ProcessGroup, device: torch.device) -> Guard:
    """For calls in pieces: `with guard(group, device): ...` breaks the group off, on every rank, if
    an error leaves one of them open.
    """
    return workspace(group, device).guard()


class Kind(NamedTuple):
    """What calls have in common that differ in their rows alone: a problem of one of them, and the
    table of plans.
    """

    problem: Problem
    table: choice.PlanTable


def _new_kind(
    pattern: Pattern, x: Tensor, w: Tensor, layout: str, plan: Plan | None, space: Workspace,
    scaling: Scaling | None,
) -> Kind:  # fmt: skip
    problem = _problem(pattern, x, w, space, layout, scaling)
    _refuse_plan(problem, plan, space)
    return Kind(problem, choice.agreed_table(problem, plan, space))


def _refuse_plan(problem: Problem, plan: Plan | None, space: Workspace) -> None:
    if plan and (reason := registry.refusal(problem, plan.strategy, space.missing, plan)):
        error = f"{problem}: the plan {plan.dumps()} cannot run: {reason}"
        refuse(error, space.group, space.device)


def _new_decision(kind: Kind, rows: int, plan: Plan | None, space: Workspace) -> Decision:
    problem, fallback = kind.problem.of_x_rows(rows), None
    _refuse_plan(problem, plan, space)
    if plan is None:
        plan, fallback = choice.choose(problem, kind.table, space)
    if problem.wire and problem.world_size > 1 and plan.strategy != "hopper":
        why = f"{plan.strategy} sends no partial sums in e4m3, `hopper` alone does"
        warnings.warn(f"flux_megatron: FLUX_MEGATRON_FP8_WIRE=1: {why}", stacklevel=2)
    description = f"{problem} with {plan.dumps()}"
    strategy = registry.strategy(problem, plan.strategy)
    return Decision(str(problem.pattern), strategy, plan, space, fallback, description, problem)


def _problem(
    pattern: Pattern, x: Tensor, w: Tensor, space: Workspace, layout: str,
    scaling: Scaling | None = None,
) -> Problem:  # fmt: skip
    N_local = w.shape[0] if layout == "nt" else w.shape[1]
    dtype = str(x.dtype).removeprefix("torch.")
    return Problem.of_operands(
        pattern, x.shape[0], N_local, x.shape[1], dtype, space.world_size, layout, x.device.type,
        beside=settings.get().beside == "1",
        out_dtype=str(scaling.out_dtype).removeprefix("torch.") if scaling else "",
        split_accumulator=scaling is not None and scaling.split_accumulator,
        blockwise=scaling is not None and scaling.blockwise,
        wire=scaling is not None and scaling.wire,
    )  # fmt: skip
