"""What a run may launch is compiled at the first call of a layer kind, before races and training.

The kinds of a model's layers are known by their first: a kernel depends on the pattern, the layout
and the dtype, hardly on N and K, so a column layer has those of a row layer compiled too, both in
forward and backward, FP8 with the dtype of gradients, and with a wide result.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from flux_megatron.kernels import compiled_ahead
from flux_megatron.kernels.sizes import cdiv
from flux_megatron.kernels.triton_launch import Code
from flux_megatron.overlap import codes, registry
from flux_megatron.problem import Plan, Problem
from flux_megatron.symm.groups import timeout_s
from flux_megatron.symm.workspace import Workspace
from flux_megatron.tuning.environment import sources_digest
from flux_megatron.tuning.plan_table import (
    LOG2_MOST,
    PlanTable,
    for_rows,
    raced_as,
    racers,
    range_of,
    ruled,
)

WIDE = 1 << 17  # columns, or rows of a weight, as of an output layer

_asked: set[str] = set()  # marks of what processes of this one have compiled


def compile_kinds(
    problem: Problem, ranges: Iterable[int], table: PlanTable, space: Workspace
) -> None:
    """Compile what calls like the problem's may launch at any M of these ranges, and those of the
    layers around it. Collective: each rank compiles a part, and waits for all.
    """
    done = space.agreed.setdefault(("compiled", replace(problem, M=0)), set())
    new = {*ranges} - done
    if not new:
        return
    done |= new
    started = time.monotonic()
    needed = _codes([problem], new, table, space)
    around = _around(problem)
    seen = space.agreed.setdefault(("compiled around", frozenset(new)), set())
    if not {_without_sizes(one) for one in around} <= seen:
        needed += _codes(around, new, PlanTable(), space)
        seen |= {_without_sizes(one) for one in (problem, *around)}
    process = _started([*dict.fromkeys(needed)], space)
    if process is not None:
        compiled_ahead.wait(process, min(compiled_ahead.LIMIT_S, timeout_s(space.group) / 2))
    space.agreement.confirm("kernels are compiled")
    if process is not None and dist.get_rank() == 0:
        took_s = time.monotonic() - started
        print(f"flux_megatron: compiled kernels in {took_s:.0f} s, once a machine", file=sys.stderr)


def _around(problem: Problem) -> list[Problem]:
    """Kinds of layers that are in a model with this one, forward and backward, with a narrow and a
    wide result, and with more or fewer products in a sum: from four ranks on the code of GEMM+RS
    depends on how many chunks there are of them.
    """
    layouts = ("nt",) if problem.scaled else ("nn", "nt")  # wgmma has no FP8 of columns
    if not problem.spec.dual:
        return [replace(problem, layout=layout) for layout in layouts if layout != problem.layout]
    hidden = min(problem.N, problem.K)
    found = [replace(one, layout=layout) for one in (problem, problem.dual) for layout in layouts]
    for one in [*found]:
        found += [replace(one, N=N) for N in (hidden, max(one.N, WIDE))]
        if one.spec.reduces:
            sums = {hidden, max(one.K, WIDE), *codes.lengths_of_sums(one, hidden)}
            found += [replace(one, N=hidden, K=K) for K in sorted(sums)]
    if problem.scaled and not problem.blockwise and not problem.split_accumulator:
        # gradients, as TransformerEngine has them
        found += [replace(one, dtype="float8_e5m2", split_accumulator=True) for one in found]
    return [one for one in dict.fromkeys(found) if one != problem]


def _without_sizes(problem: Problem) -> Problem:
    return replace(problem, M=0, N=0, K=0)


def _codes(
    kinds: Iterable[Problem], ranges: Iterable[int], table: PlanTable, space: Workspace
) -> list[Code]:
    found = {
        code: None
        for kind in kinds
        for number in ranges
        for problem, one in _plans(kind, number, table, space)
        for code in codes.of_calls(problem, one, space)
    }
    return [*found]


def _plans(
    kind: Problem, number: int, table: PlanTable, space: Workspace
) -> Iterator[tuple[Problem, Plan]]:
    """The plans that calls of a range may have, each with some rows that have all of its code."""
    for M in _rows(number, kind.world_size):
        problem = replace(kind, M=M)
        names = [*registry.runnable(problem, "auto", space.missing)]
        for one in dict.fromkeys(_candidates(kind, number, problem, names, table, space)):
            if registry.refusal(problem, one.strategy, space.missing, one) is None:
                yield problem, one


def _candidates(
    kind: Problem, number: int, problem: Problem, names: list[str], table: PlanTable,
    space: Workspace,
) -> list[Plan]:  # fmt: skip
    if not names:
        return []
    found = [ruled(problem, names, space.missing)]
    if (measured := table.measured(problem)) is not None:
        return [measured, *found]
    raced = raced_as(kind, number)
    names = [*registry.runnable(raced, "auto", space.missing)]
    return found + [for_rows(one, raced.M, problem) for one in racers(raced, names, space.missing)]


def _rows(number: int, world_size: int) -> list[int]:
    """Of a range: its ends, and of each power of two some that are multiples of 16 and some that
    are not; of the fewest all.
    """
    wanted = {*range(1, 17)} | {
        one + add for one in (1 << n for n in range(4, 20)) for add in (0, 1, 16)
    }
    wanted |= {round(2 ** (number - 0.5)) + add for add in (0, 1, 2, world_size)}
    wanted |= {round(2 ** (number + 0.5)) - add for add in (0, 1, 2, world_size)}
    whole = {cdiv(M, world_size) * world_size for M in wanted}
    return sorted(M for M in whole if range_of(M) == number and M < 1 << (LOG2_MOST + 1))


def _started(codes: list[Code], space: Workspace) -> Any:
    """A process that has this rank's part of those compiled that never were, or None."""
    mine = codes[space.group.rank() :: space.world_size]
    marks = {compiled_ahead.mark_of(code, sources_digest()): code for code in mine}
    new = [mark for mark in marks if mark not in _asked and not compiled_ahead.is_marked(mark)]
    _asked.update(new)
    if not new:
        return None
    # two a core, for one that begins when another has ended is the last to end
    return compiled_ahead.start([marks[mark] for mark in new], new, 2 * _cores(), space.device)


def _cores() -> int:
    """How many of the machine's are this rank's."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or torch.cuda.device_count() or 1)
    return max(1, len(os.sched_getaffinity(0)) // ranks)
