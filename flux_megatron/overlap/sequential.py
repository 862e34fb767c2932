"""The plain strategy: one collective and one library GEMM. It runs every problem, and is the
baseline of all other strategies.

Backward hides its collectives behind the other GEMM, as Megatron does: both start asynchronously.

    AG+GEMM           all-gather of x | GEMM
    GEMM+RS           GEMM | reduce-scatter
    row backward      all-gather of dy | dgrad | wgrad
    column backward   all-gather of x, beside it dgrad | reduce-scatter of dx, beside it wgrad
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flux_megatron.overlap import collectives
from flux_megatron.overlap.phase import phase
from flux_megatron.patterns import COLUMN, ROW, Pattern
from flux_megatron.problem import Plan, Problem
from flux_megatron.scaling import BLOCK, E4M3, PADDING, Scaling, dequantized, is_fp8, scales_of
from flux_megatron.symm.space import Workspace

PATTERNS = (COLUMN, ROW, Pattern.GEMM_AR)
NEEDS_SYMMETRIC_MEMORY = False


def supports(problem: Problem) -> str | None:
    """None: this strategy can run every problem."""
    return None


def default_plan(problem: Problem) -> Plan:
    return Plan("sequential")


def why_not(problem: Problem, plan: Plan) -> str | None:
    """None: there is nothing to it."""
    return None


def candidates(problem: Problem) -> list[Plan]:
    """Plans worth measuring: the default plan."""
    return [default_plan(problem)]


@dataclass(frozen=True)
class UnderWay:
    """A collective that has begun, or none: `complete` or `finish` gives the `result`, for the
    current stream. What is read stays until then.
    """

    result: Tensor
    work: dist.Work | None = None
    workspace: Any = None
    read: Tensor | None = None

    def complete(self) -> Tensor:
        if self.work is not None:
            with phase("wait"):
                collectives.wait(self.work, self.workspace)
        return self.result

    finish = complete

    def close(self) -> None: ...


def start_gather(x: Tensor, plan: Plan, workspace: Workspace) -> UnderWay:
    """All-gather x [M_shard, K] in the background; `complete` gives [M, K]."""
    gathered = x.new_empty(workspace.group.size() * x.shape[0], x.shape[1])
    with phase("all-gather"):
        out, rows = (gathered, x)
        if is_fp8(x):  # no collective knows these dtypes
            out, rows = gathered.view(torch.uint8), x.view(torch.uint8)
        work = collectives.start(dist.all_gather_into_tensor, out, rows, workspace=workspace)
    return UnderWay(gathered, work, workspace)


def ag_gemm(
    x: Tensor, w: Tensor, bias: Tensor | None, layout: str, plan: Plan, workspace: Workspace,
    consume: Callable[[Tensor], None] | None, scaling: Scaling | None = None,
) -> Tensor:  # fmt: skip
    """all_gather(x) @ w + bias; `consume` is called with the gathered rows."""
    gathered = start_gather(x, plan, workspace).complete()
    if scaling is not None and scaling.blockwise:
        scaling = _with_all_rows(scaling, x, workspace)
    with phase("gemm chunk"):
        y = scaled_gemm(gathered, w, bias, scaling) if scaling else _gemm(gathered, w, layout)
    if bias is not None and scaling is None:
        y += bias
    if consume is not None:
        consume(gathered)
    return y


def _with_all_rows(scaling: Scaling, x: Tensor, workspace: Workspace) -> Scaling:
    """The blockwise scales of gathered rows."""
    shards = scaling.x.new_empty(workspace.group.size() * len(scaling.x), scaling.x.shape[1])
    work = dist.all_gather_into_tensor(shards, scaling.x, group=workspace.group, async_op=True)
    collectives.wait(work, workspace)
    return scaling._replace(x=scales_of(shards, x.shape[1], len(x)))


def _gemm(x: Tensor, w: Tensor, layout: str) -> Tensor:
    """x @ w in their dtype, which autocast would change but for `out`: 2 us more of the host."""
    right = w.t() if layout == "nt" else w
    if torch.is_autocast_enabled(x.device.type):
        return torch.mm(x, right, out=x.new_empty(x.shape[0], right.shape[1]))
    return torch.mm(x, right)


def scaled_gemm(x: Tensor, w: Tensor, bias: Tensor | None, scaling: Scaling) -> Tensor:
    """x @ w.t() * scales + bias, rounded once, by the library where it has FP8."""
    of_w = scaling.w.t() if scaling.blockwise else scaling.w
    return scaled_gemm_of(x, scaling)(x, w.t(), scaling.x, of_w, None, bias)


def scaled_gemm_of(x: Any, scaling: Scaling) -> Callable[..., Tensor]:
    """The same, for x of this shape. It takes x, w.t(), the scales of both, those of w's blocks
    transposed as w is, where the result goes, and the bias.
    """
    return partial(_by_library if _in_library(x, scaling) else _by_real_values, scaling)


def _by_library(
    scaling: Scaling, x: Tensor, right: Tensor, of_x: Tensor, of_w: Tensor,
    out: Tensor | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    _, _, dtype, split, blockwise, _ = scaling
    if blockwise:
        blocks = of_x.shape[0]
        of_x, of_w = of_x.t(), of_w if of_w.shape[0] == blocks else of_w[:blocks]
    else:
        of_x, of_w = of_x.reshape(()), of_w.reshape(())
    inside = None if dtype is torch.float32 else bias  # the library adds none in fp32
    y = torch._scaled_mm(
        x, right, of_x, of_w, bias=inside, out_dtype=dtype, use_fast_accum=not split, out=out
    )
    return y if inside is bias else y.add_(bias)  # type: ignore[arg-type]


def _by_real_values(
    scaling: Scaling, x: Tensor, right: Tensor, of_x: Tensor, of_w: Tensor,
    out: Tensor | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if scaling.blockwise:
        real_x, real_w = dequantized(x, right.t(), scaling._replace(x=of_x, w=of_w.t()))
        y = torch.mm(real_x, real_w.t())
    else:
        y = torch.mm(x.float(), right.float()) * (of_x.reshape(()) * of_w.reshape(()))
    y = (y if bias is None else y + bias.float()).to(scaling.out_dtype)
    return y if out is None else out.copy_(y)


def _in_library(x: Any, scaling: Scaling) -> bool:
    if x.device.type != "cuda":
        return False
    if scaling.blockwise:
        return blocks_refused(x.device, *x.shape) is None
    return torch.cuda.get_device_capability(x.device) >= (8, 9)


def blocks_refused(device: torch.device, rows: int, K: int) -> str | None:
    """Why the library has no GEMM of so many rows with blockwise scales, or None. A CPU has none,
    and makes such GEMMs of real values.
    """
    if device.type == "cpu":
        return None
    if rows % PADDING:
        return f"{rows} rows in a GEMM with blockwise scales, a multiple of {PADDING} expected"
    blocks = -(-K // BLOCK)
    return _refusal(device, 1 if blocks % PADDING else PADDING)


@cache
def _refusal(device: torch.device, blocks: int) -> str | None:
    """Of the library itself, with so many blocks of K: some versions of torch know no padding."""
    scaling = Scaling(
        torch.ones(blocks, BLOCK, device=device), torch.ones(2, PADDING, device=device),
        torch.bfloat16, True, True,
    )  # fmt: skip
    x, w = (torch.ones(n, blocks * BLOCK, device=device).to(E4M3) for n in (BLOCK, 2 * BLOCK))
    try:
        _by_library(scaling, x, w.t(), scaling.x, scaling.w.t())
    except (RuntimeError, ValueError) as error:
        return (
            f"this torch and GPU have no GEMM with blockwise scales: {str(error).splitlines()[0]}"
        )
    return None


def start_gemm_rs(
    x: Tensor, w: Tensor, layout: str, plan: Plan, workspace: Workspace,
    scaling: Scaling | None = None,
) -> UnderWay:  # fmt: skip
    """x @ w, then its reduce-scatter in the background; `finish` gives y [M_shard, N]."""
    with phase("gemm chunk"):
        partial = scaled_gemm(x, w, None, scaling) if scaling else _gemm(x, w, layout)
    y = partial.new_empty(partial.shape[0] // workspace.group.size(), partial.shape[1])
    with phase("reduce-scatter"):
        work = collectives.start(dist.reduce_scatter_tensor, y, partial, workspace=workspace)
    return UnderWay(y, work, workspace, partial)


def start_gemm_ar(x: Tensor, w: Tensor, layout: str, plan: Plan, workspace: Workspace) -> UnderWay:
    """x @ w, then its all-reduce in the background; `finish` gives y [M, N]."""
    with phase("gemm chunk"):
        y = _gemm(x, w, layout)
    with phase("all-reduce"):
        work = collectives.start(dist.all_reduce, y, workspace=workspace)
    return UnderWay(y, work, workspace)


def gemm_rs(
    x: Tensor, w: Tensor, layout: str, plan: Plan, workspace: Workspace,
    scaling: Scaling | None = None,
) -> Tensor:  # fmt: skip
    return start_gemm_rs(x, w, layout, plan, workspace, scaling).finish()


def gemm_ar(x: Tensor, w: Tensor, layout: str, plan: Plan, workspace: Workspace) -> Tensor:
    return start_gemm_ar(x, w, layout, plan, workspace).finish()
