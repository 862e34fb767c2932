"""`flux-megatron doctor --strategies`: which strategies can run which operations on this machine,
or why not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from flux_megatron.problem import Pattern, Problem

SIZE = 8192  # M, N and K of the problem that is asked about
FEW_ROWS = 128  # M where a strategy is for few rows
WORKS, LOCAL = "works", "no communication"
# Why a strategy is impossible for an operation, on any machine.
ON_DEVICE = (
    "impossible: its transfers are sized on the host, and sizes are known on the device only"
)
NO_GEMM = "impossible: there is no GEMM to overlap, bags are pooled"
NOT_BUILT = "not built"


class Line(NamedTuple):
    """One strategy of one operation: `works`, or why it cannot run, forward and backward."""

    operation: str
    strategy: str
    forward: str
    backward: str


def lines(world_size: int) -> Iterator[Line]:
    """Every operation x strategy. Backward is dgrad: the dual pattern over the weight as it is."""
    import torch

    from flux_megatron.embedding.operation import STRATEGIES as OF_BAGS
    from flux_megatron.expert_parallel.call import STRATEGIES as OF_EXPERTS
    from flux_megatron.kernels import launch
    from flux_megatron.kernels.hopper import gemm as hopper_gemm
    from flux_megatron.overlap import registry

    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = [*dict.fromkeys(name for table in registry.STRATEGIES.values() for name in table)]
    for pattern in Pattern:
        forward = Problem(pattern, SIZE, SIZE, SIZE, "bfloat16", world_size, device=device)
        for name in names:
            backward = _can(forward.dual, name) if pattern.spec.dual else LOCAL
            yield Line(str(pattern), name, _can(forward, name), backward)
    kernels = launch.supports_tensors("bfloat16", device) or WORKS
    own = {"fused": kernels, "signalled": kernels, "sequential": WORKS}
    own["hopper"] = hopper_gemm.refuses_experts(device, torch.bfloat16, SIZE, SIZE, "nt") or WORKS
    for operation, table, reason in (
        ("a2a_gemm", OF_EXPERTS, ON_DEVICE), ("gemm_a2a", OF_EXPERTS, ON_DEVICE),
        ("embedding_a2a", OF_BAGS, NO_GEMM),
    ):  # fmt: skip
        for name in names:
            can = own[name] if name in table else reason
            yield Line(operation, name, can, can)


def _can(problem: Problem, name: str) -> str:
    from flux_megatron.overlap import registry

    if name not in registry.STRATEGIES[problem.pattern]:
        return NOT_BUILT
    if name == "low_latency":
        problem = replace(problem, M=FEW_ROWS)
    return registry.refusal(problem, name, None) or WORKS


def text(world_size: int) -> str:
    """The lines, one a row."""
    rows = [("operation", "strategy", "forward", "backward"), *lines(world_size)]
    title = f"{world_size} ranks, M = N = K = {SIZE} (low_latency: M = {FEW_ROWS}), bfloat16"
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join([title, *("  ".join([*map(str.ljust, row, widths), row[3]]) for row in rows)])
