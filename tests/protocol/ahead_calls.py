"""Which code is compiled ahead for a layer's kinds, and which code calls launch, where there is no
GPU: on the stand-ins of `offline_calls`. Launches are noted; nothing is compiled.

    python ahead_calls.py FILE    writes JSON: a text for each code
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import offline_calls
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from flux_megatron import ops, pieces
from flux_megatron.kernels.triton_launch import Code, noted
from flux_megatron.overlap import library_gemm, registry
from flux_megatron.patterns import Pattern
from flux_megatron.problem import Plan, Problem
from flux_megatron.symm import workspaces
from flux_megatron.symm.workspace import Workspace
from flux_megatron.tuning import ahead, choice
from flux_megatron.tuning.plan_table import PlanTable, raced_as, racers, together

torch.cuda.get_device_capability = lambda device=None: (9, 0)
library_gemm._refusal = lambda *given: None  # of blockwise scales, by this torch
FEWEST, MOST = 726, 20_000  # tokens of a micro-batch
DRAWN = 8
FIRST = 4096  # of a run
N, K = 1024, 2048
FORWARD = Problem(Pattern.AG_GEMM, FIRST, N, K, "bfloat16", 2)
FP8 = replace(FORWARD, dtype="float8_e4m3fn", out_dtype="bfloat16")
MODELS = (  # ranks and widths, of GPT-3 175B, Qwen3-8B and Qwen3-14B
    (2, 12288, 36864, 49152, 49152), (4, 4096, 6144, 24576, 12288), (8, 5120, 7168, 34816, 17408),
)  # fmt: skip
SCALED = [
    replace(FP8, split_accumulator=split, blockwise=blockwise)
    for split in (False, True) for blockwise in (False, True)
]  # fmt: skip


def kinds() -> list[Problem]:
    """Both layers of a pair, forward and backward."""
    other = replace(FORWARD.dual, layout="nt")
    return [FORWARD, FORWARD.dual, other, other.dual]


def compiled_ahead(
    space: Workspace, kind: Problem = FORWARD, table: PlanTable | None = None
) -> set[Code]:
    """By the first call of a kind."""
    found: set[Code] = set()
    table = table or PlanTable()
    with mock.patch.object(ahead, "_started", lambda codes, space: found.update(codes) or None):
        ahead.compile_kinds(kind, table.ranges(FIRST), table, space)
    return found


def plans(kind: Problem, M: int, space: Workspace) -> Iterator[Plan]:
    """All that races can choose for M rows."""
    problem = replace(kind, M=M)
    names = [*registry.runnable(problem, "auto", space.missing)]
    found = {PlanTable().plan(problem, names): None}
    for number in together(M):
        raced = raced_as(kind, number)
        for one in racers(raced, [*registry.runnable(raced, "auto", space.missing)]):
            found[PlanTable({raced.M: one}).plan(problem, names)] = None
    yield from found


def calls_of(kind: Problem, M: int, plan: Plan) -> Iterator[Any]:
    """Calls of a kind with M rows, by a plan, as layers make them."""
    problem, group = replace(kind, M=M), dist.group.WORLD
    x = offline_calls.matrix(problem.x_rows, problem.K_local)
    w = offline_calls.matrix(
        *((problem.N_local, problem.K_local)[:: 1 if kind.layout == "nt" else -1])
    )
    wgrad = offline_calls.wgrad
    if problem.spec.gathers:
        bias = torch.zeros(problem.N_local, dtype=torch.bfloat16)
        given = {"layout": kind.layout, "plan": plan}
        yield lambda: ops.run_ag_gemm(x, w, None, group, **given)
        yield lambda: ops.run_ag_gemm(x, w, None, group, consume=wgrad, **given)
        if not problem.is_backward:
            yield lambda: ops.run_ag_gemm(x, w, bias, group, **given)
            yield lambda: ops.run_ag_gemm(x, w, bias, group, consume=wgrad, **given)
        return
    yield lambda: ops.run_gemm_rs(x, w, group, layout=kind.layout, plan=plan)
    if problem.is_backward:
        saved = offline_calls.matrix(problem.M_shard, problem.N)
        yield lambda: _backward(saved, x, w, plan)


def _backward(saved: torch.Tensor, dy: torch.Tensor, w: torch.Tensor, plan: Plan) -> None:
    """Of a column layer, which asks for no plan."""
    with mock.patch.object(choice, "choose", return_value=(plan, None)):
        gather, scatter = pieces.start_gather_and_gemm_rs(saved, dy, w, dist.group.WORLD)
        offline_calls.wgrad(gather.complete())
        gather.close()
        scatter.finish()


def launched(kind: Problem, M: int, space: Workspace) -> dict[Code, str]:
    """By all calls, each with what launches it."""
    found: dict[Code, str] = {}
    by_torch = offline_calls.by_torch
    for plan in plans(kind, M, space):
        if plan.strategy == "sequential":
            continue
        for number, call in enumerate(calls_of(kind, M, plan)):
            space.checked.clear()
            with (
                noted() as codes,
                mock.patch.multiple(torch.Tensor, add_=by_torch, copy_=by_torch),
                mock.patch.object(torch, "mm", by_torch),
            ):
                call()
            offline_calls.DRIVER.count.value = 0
            for code in codes:
                found.setdefault(code, f"call {number} of {replace(kind, M=M)} by {plan}")
    return found


def later(world_size: int, hidden: int, qkv: int, fc1: int, ffn: int) -> list[str]:
    """Code of the layers of a model that the first of them has not had compiled, where all ranges
    are and where one is: of the first layer with some.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    first = replace(FORWARD, world_size=world_size, N=qkv, K=hidden)
    shapes = ((Pattern.GEMM_RS, hidden, hidden), (Pattern.AG_GEMM, fc1, hidden),
              (Pattern.GEMM_RS, hidden, ffn), (Pattern.AG_GEMM, 151936, hidden))  # fmt: skip
    layers = [first, *(replace(first, pattern=one, N=n, K=k) for one, n, k in shapes)]
    found: list[str] = []
    with offline_calls.engine(False):
        space = workspaces.workspace(dist.group.WORLD, torch.device("cpu"))
        for apart in (False, True):
            space.agreed.clear()
            table = PlanTable(apart=apart)
            known = compiled_ahead(space, first, table)
            for one in (*layers[1:], *(one.dual for one in layers)):
                if not found and (new := compiled_ahead(space, one, table) - known):
                    found = [f"{one}: {code!r}" for code in new]
    dist.destroy_process_group()
    return found


def missed(space: Workspace, kernels: Counter[str]) -> list[str]:
    """What calls launch that was not compiled ahead: up to the first number of rows with such a
    call, as nobody reads more. Counts the kernels of all code that is launched.
    """
    ahead_of_calls, drawn, found = compiled_ahead(space), random.Random(58), set()
    rows = [FIRST, *(2 * drawn.randint(FEWEST // 2, MOST // 2) for _ in range(DRAWN))]
    for kind, M in itertools.product(kinds(), rows):
        new = {code: by for code, by in launched(kind, M, space).items() if code not in found}
        found |= new.keys()
        kernels.update(code.kernel for code in new)
        if late := [f"{by}: {code!r}" for code, by in new.items() if code not in ahead_of_calls]:
            return late
    return []


def main(path: str) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    if mutant := os.environ.get("MUTANT"):
        module, file = mutant.split("=")
        code = compile(Path(file).read_text(), file, "exec")
        exec(code, vars(importlib.import_module(module)))
    kernels: Counter[str] = Counter()
    with offline_calls.engine(False):
        space = workspaces.workspace(dist.group.WORLD, torch.device("cpu"))
        written: dict[str, Any] = {"missed": missed(space, kernels), "kernels": kernels}
        if not written["missed"]:
            scaled = [one for given in SCALED for one in compiled_ahead(space, given)]
            written["fp8"] = Counter(code.kernel for code in scaled)
    dist.destroy_process_group()
    if not written["missed"]:
        written["later"] = [one for model in MODELS for one in later(*model)]
    Path(path).write_text(json.dumps(written))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
