"""The public operations, and the checks that every call passes before any rank could hang.

`all_gather_gemm` and `gemm_reduce_scatter` are torch custom operators, so torch.compile keeps them
whole. They are not differentiable by themselves: `nn.functions` joins them to their duals. The
functions below them are the same operations in pieces, for the schedules of backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d

from flux_megatron import settings
from flux_megatron.overlap import registry
from flux_megatron.overlap.report import note_call, note_fallback
from flux_megatron.problem import Pattern, Plan, Problem
from flux_megatron.symm.workspace import Workspace, workspace

LAYOUTS = ("nt", "nn")


def all_gather_gemm(
    x: Tensor, w: Tensor, group: ProcessGroup, *,
    bias: Tensor | None = None, layout: str = "nt", plan: Plan | None = None,
) -> Tensor:  # fmt: skip
    """AG+GEMM (FLUX, section 4.2): the gathering of x hidden behind the GEMM.

        y = torch.cat([x of rank 0, ..., x of rank R-1]) @ w.t() + bias  # "nn": w, not w.t()

    | tensor | shape on each rank (R = world size) |
    | --- | --- |
    | x | [M / R, K] |
    | w | [N / R, K], or [K, N / R] for "nn" |
    | bias | [N / R] or None |
    | result | [M, N / R] |

    Dense, contiguous, one dtype, one device. `ValueError` names what was given and expected;
    `ProblemMismatch`, on every rank, if the ranks bring different problems; `SignalTimeout` if a
    rank does not come.
    """
    return _all_gather_gemm(x, w, bias, group.group_name, layout, plan.dumps() if plan else "")


def gemm_reduce_scatter(
    x: Tensor, w: Tensor, group: ProcessGroup, *, layout: str = "nt", plan: Plan | None = None
) -> Tensor:
    """GEMM+RS (FLUX, section 4.1): the scatter hidden behind the GEMM, then an fp32 sum.

        y = sum([x of rank s @ w.t() of rank s for s in range(R)]).chunk(R)[rank]  # "nn": w

    | tensor | shape on each rank (R = world size) |
    | --- | --- |
    | x | [M, K / R] |
    | w | [N, K / R], or [K / R, N] for "nn" |
    | result | [M / R, N] |

    M must be a multiple of R. Errors as for `all_gather_gemm`. Each rank's partial result is
    rounded to the dtype of x before it travels, as it is for a reduce-scatter of that dtype.
    """
    return _gemm_reduce_scatter(x, w, group.group_name, layout, plan.dumps() if plan else "")


def _group(name: str) -> ProcessGroup:
    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type, unused-ignore]


@torch.library.custom_op("flux_megatron::all_gather_gemm", mutates_args=())
def _all_gather_gemm(
    x: Tensor, w: Tensor, bias: Tensor | None, group: str, layout: str, plan: str
) -> Tensor:
    return run_ag_gemm(x, w, bias, _group(group), layout=layout, plan=_plan(plan))


@_all_gather_gemm.register_fake
def _(x, w, bias, group, layout, plan):
    N = w.shape[0] if layout == "nt" else w.shape[1]
    return x.new_empty(x.shape[0] * _group(group).size(), N)


@torch.library.custom_op("flux_megatron::gemm_reduce_scatter", mutates_args=())
def _gemm_reduce_scatter(x: Tensor, w: Tensor, group: str, layout: str, plan: str) -> Tensor:
    process_group = _group(group)
    return start_gemm_rs(x, w, process_group, layout=layout, plan=_plan(plan)).finish()


@_gemm_reduce_scatter.register_fake
def _(x, w, group, layout, plan):
    N = w.shape[0] if layout == "nt" else w.shape[1]
    return x.new_empty(x.shape[0] // _group(group).size(), N)


@lru_cache(maxsize=1024)
def _plan(text: str) -> Plan | None:
    return Plan.loads(text) if text else None


def run_ag_gemm(
    x: Tensor, w: Tensor, bias: Tensor | None, group: ProcessGroup, *,
    layout: str = "nt", plan: Plan | None = None, consume: Callable[[Tensor], None] | None = None,
) -> Tensor:  # fmt: skip
    """`all_gather_gemm` that also lends the gathered rows [M, K] to `consume`, whose reads it
    waits for.
    """
    decision = _decide(Pattern.AG_GEMM, x, w, bias, group, layout, plan)
    decision.count()
    return decision.strategy.ag_gemm(x, w, bias, layout, decision.plan, decision.workspace, consume)


def start_gather(x: Tensor, w: Tensor, group: ProcessGroup, *, layout: str = "nt"):
    """Gather x as `run_ag_gemm(x, w, ...)` does, in the background: an object with `complete` and
    `close`.
    """
    decision = _decide(Pattern.AG_GEMM, x, w, None, group, layout, None)
    return decision.strategy.start_gather(x, decision.plan, decision.workspace)


def start_gemm_rs(
    x: Tensor, w: Tensor, group: ProcessGroup, *, layout: str = "nt", plan: Plan | None = None
):
    """`gemm_reduce_scatter` in two steps: an object whose `finish` gives the result; other work
    fits in between.
    """
    decision = _decide(Pattern.GEMM_RS, x, w, None, group, layout, plan)
    decision.count()
    return decision.strategy.start_gemm_rs(x, w, layout, decision.plan, decision.workspace)


@dataclass(frozen=True)
class _Decision:
    problem: Problem
    strategy: ModuleType
    plan: Plan
    workspace: Workspace
    fallback: str | None

    def count(self) -> None:
        if self.fallback is None:
            note_call(self.problem.pattern, self.plan.strategy)
        else:
            note_fallback(self.problem.pattern, self.fallback)


def _decide(
    pattern: Pattern, x: Tensor, w: Tensor, bias: Tensor | None, group: ProcessGroup,
    layout: str, plan: Plan | None,
) -> _Decision:  # fmt: skip
    """Check the call, choose its plan, and ask the other ranks once for each new kind of call."""
    space = workspace(group, x.device)
    if complaint := _complaint(pattern, x, w, bias, group.size(), layout, plan):
        space.agreement.refuse(complaint)
        raise ValueError(f"{pattern}: {complaint}")
    key = (pattern, x.shape, w.shape, x.dtype, bias is None, layout, plan, settings.get())
    if key not in space.decisions:
        space.decisions[key] = _new_decision(pattern, x, w, group.size(), layout, plan, space)
    return space.decisions[key]


def _new_decision(
    pattern: Pattern, x: Tensor, w: Tensor, world_size: int, layout: str, plan: Plan | None,
    space: Workspace,
) -> _Decision:  # fmt: skip
    gathers = pattern is Pattern.AG_GEMM
    N = w.shape[0] if layout == "nt" else w.shape[1]
    problem = Problem(
        pattern=pattern,
        M=x.shape[0] * (world_size if gathers else 1),
        N=N * (world_size if gathers else 1),
        K=x.shape[1] * (1 if gathers else world_size),
        dtype=str(x.dtype).removeprefix("torch."),
        world_size=world_size,
        layout=layout,
        device=x.device.type,
    )
    fallback = None
    if plan is None:
        plan, fallback = registry.choose(problem, space.unavailable)
    elif reason := space.unavailable or registry.strategy(problem, plan.strategy).supports(problem):
        raise ValueError(f"{problem}: the plan {plan} cannot run: {reason}")
    space.agreement.confirm(f"{problem} with {plan.dumps()}")
    return _Decision(problem, registry.strategy(problem, plan.strategy), plan, space, fallback)


def _complaint(
    pattern: Pattern, x: Tensor, w: Tensor, bias: Tensor | None, world_size: int,
    layout: str, plan: Plan | None,
) -> str | None:  # fmt: skip
    """What is wrong with the arguments of this rank: what was given and what was expected."""
    if layout not in LAYOUTS:
        return f"layout {layout!r} given, one of {LAYOUTS} expected"
    if plan is not None and plan.strategy not in registry.STRATEGIES[pattern]:
        return (
            f"strategy {plan.strategy!r} given, one of {[*registry.STRATEGIES[pattern]]} expected"
        )
    if x.dim() != 2 or w.dim() != 2:
        return f"x {_told(x)} and w {_told(w)} given, two matrices expected"
    if not x.dtype.is_floating_point or w.dtype != x.dtype:
        return f"x {_told(x)} and w {_told(w)} given, one floating-point dtype expected"
    if w.device != x.device:
        return f"x {_told(x)} and w {_told(w)} given, one device expected"
    if not x.is_contiguous() or not w.is_contiguous():
        return f"strides x {x.stride()}, w {w.stride()} given, contiguous rows expected"
    inner, outer = (w.shape[1], w.shape[0]) if layout == "nt" else (w.shape[0], w.shape[1])
    if inner != x.shape[1]:
        return f"x {_told(x)} and w {_told(w)} given, equal K expected for layout {layout!r}"
    if 0 in (*x.shape, *w.shape):
        return f"x {_told(x)} and w {_told(w)} given, no empty dimension expected"
    if pattern is Pattern.GEMM_RS and x.shape[0] % world_size:
        return f"x {_told(x)} given, rows divisible by the group's {world_size} ranks expected"
    if bias is not None and (bias.shape != (outer,) or bias.dtype != x.dtype):
        return f"bias {_told(bias)} given, [{outer}] {x.dtype} expected"
    if bias is not None and bias.device != x.device:
        return f"bias {_told(bias)} given, {x.device} expected"
    return None


def _told(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
