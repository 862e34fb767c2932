"""`flux-megatron patterns`: which strategies can run which operations on this machine, or why not;
and where each was shown to be exact, and was timed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from rich.table import Table

from flux_megatron.embedding.operation import STRATEGIES as OF_BAGS
from flux_megatron.expert_parallel.call import STRATEGIES as OF_EXPERTS
from flux_megatron.kernels import hopper_gemm, launch
from flux_megatron.overlap import registry
from flux_megatron.overlap.low_latency import MOST_ROWS
from flux_megatron.patterns import Pattern
from flux_megatron.problem import Problem

SIZE = 8192  # M, N and K of the problem that is asked about
WORKS, LOCAL = "works", "no communication"
# Why a strategy is impossible for an operation, on any machine.
ON_DEVICE = (
    "impossible: its transfers are sized on the host, and sizes are known on the device only"
)
NO_GEMM = "impossible: there is no GEMM to overlap, bags are pooled"
NOT_BUILT = "not built"
# Written by tests/pattern_evidence.py from the tests' parameters and the committed rows.
EVIDENCE = json.loads(Path(__file__).with_name("pattern_evidence.json").read_text())


class Line(NamedTuple):
    """One strategy of one operation: `works`, or the reason why it cannot run, forward and
    backward; on how many CPU ranks its exact tests run, those of `hopper` on virtual ones with
    emulated Gluon; in which rows GPUs have timed it, beside a baseline and after a comparison with
    the reference.
    """

    operation: str
    strategy: str
    forward: str
    backward: str
    cpu_ranks: str
    timed: str


def lines(world_size: int) -> Iterator[Line]:
    """Every operation x strategy. Backward is dgrad: the dual pattern over the weight as it is."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = [*dict.fromkeys(name for table in registry.STRATEGIES.values() for name in table)]
    for pattern in Pattern:
        forward = Problem(pattern, SIZE, SIZE, SIZE, "bfloat16", world_size, device=device)
        for name in names:
            backward = _can(forward.dual, name) if pattern.spec.dual else LOCAL
            yield _line(str(pattern), name, _can(forward, name), backward)
    kernels = launch.supports_tensors("bfloat16", device) or WORKS
    own = {"fused": kernels, "signalled": kernels, "sequential": WORKS}
    own["hopper"] = hopper_gemm.refuses_experts(device, torch.bfloat16, SIZE, SIZE, "nt") or WORKS
    for operation, table, reason in (
        ("a2a_gemm", OF_EXPERTS, ON_DEVICE), ("gemm_a2a", OF_EXPERTS, ON_DEVICE),
        ("embedding_a2a", OF_BAGS, NO_GEMM),
    ):  # fmt: skip
        for name in names:
            can = own[name] if name in table else reason
            yield _line(operation, name, can, can)


def _can(problem: Problem, name: str) -> str:
    if name not in registry.STRATEGIES[problem.pattern]:
        return NOT_BUILT
    if name == "low_latency":
        problem = replace(problem, M=MOST_ROWS)
    return registry.refusal(problem, name, None) or WORKS


def _line(operation: str, strategy: str, forward: str, backward: str) -> Line:
    known = EVIDENCE.get(f"{operation} {strategy}", {})
    timed = [
        f"{direction}: {files[0]}" + (f" and {len(files) - 1} more" if len(files) > 1 else "")
        for direction in ("forward", "backward")
        if (files := known.get(direction))
    ]
    ranks = " ".join(map(str, known.get("cpu", ())))
    return Line(operation, strategy, forward, backward, ranks, "; ".join(timed))


def table(world_size: int) -> Table:
    """The lines, to be printed."""
    title = f"{world_size} ranks, M = N = K = {SIZE} (low_latency: M = {MOST_ROWS}), bfloat16"
    made = Table(title=title)
    headings = ("operation", "strategy", "forward", "backward", "exact on CPU, ranks", "GPU rows")
    for heading in headings:
        made.add_column(heading)
    previous = ""
    for line in lines(world_size):
        if previous not in ("", line.operation):
            made.add_section()
        made.add_row(*line)
        previous = line.operation
    return made
