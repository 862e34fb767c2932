"""`flux-megatron patterns`: which strategies can run which patterns on this machine, or why not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from rich.table import Table

from flux_megatron.expert_parallel.call import STRATEGIES
from flux_megatron.kernels import launch
from flux_megatron.overlap import registry
from flux_megatron.patterns import Pattern
from flux_megatron.problem import Problem

SIZE = 8192  # M, N and K of the problem that is asked about
WORKS, NOT_BUILT, LOCAL = "works", "not built", "no communication"


class Line(NamedTuple):
    """One strategy of one pattern: `works`, `not built`, or the reason why it cannot run here."""

    pattern: Pattern
    strategy: str
    forward: str
    backward: str


def lines(world_size: int) -> Iterator[Line]:
    """Every pattern x strategy. Backward is dgrad: the dual pattern over the weight as it lies."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = dict.fromkeys(name for table in registry.STRATEGIES.values() for name in table)
    for pattern in Pattern:
        forward = Problem(pattern, SIZE, SIZE, SIZE, "bfloat16", world_size, device=device)
        for name in names:
            backward = _can(forward.dual, name) if pattern.spec.dual else LOCAL
            yield Line(pattern, name, _can(forward, name), backward)


def _can(problem: Problem, name: str) -> str:
    if name not in registry.STRATEGIES[problem.pattern]:
        return NOT_BUILT
    return registry.refusal(problem, name, None) or WORKS


def table(world_size: int) -> Table:
    """The lines, to be printed."""
    made = Table(title=f"{world_size} ranks, M = N = K = {SIZE}, bfloat16")
    for heading in ("pattern", "strategy", "forward", "backward"):
        made.add_column(heading)
    for line in lines(world_size):
        made.add_row(f"{line.pattern.spec.title} ({line.pattern})", *line[1:])
    for cells in expert_lines():
        made.add_row(*cells)
    return made


def expert_lines() -> Iterator[tuple[str, str, str, str]]:
    """The operations of expert parallelism, each of which is the backward of the other."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kernels = launch.supports_tensors("bfloat16", device)
    reasons = {"fused": kernels, "signalled": kernels, "sequential": None}
    for operation in ("a2a_gemm", "gemm_a2a"):
        for name in STRATEGIES:
            can = reasons[name] or WORKS
            yield f"experts ({operation})", name, can, can
