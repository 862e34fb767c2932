"""Which kernels the calls of a plan launch, before there is a call: those of their programs."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from flux_megatron.kernels.hopper import config as hopper_config
from flux_megatron.kernels.hopper.split_tiles import K_TILES_MIN
from flux_megatron.kernels.triton_launch import Code
from flux_megatron.overlap import registry
from flux_megatron.problem import Plan, Problem
from flux_megatron.scaling import Scaling, block_shapes
from flux_megatron.symm.enqueue import BIAS, W, X
from flux_megatron.symm.program import Builder, CallProgram
from flux_megatron.symm.steps import Launch, Slot
from flux_megatron.symm.workspace import Workspace


def lengths_of_sums(problem: Problem, longer_than: int) -> list[int]:
    """K of GEMM+RS for each number of chunks of `hopper` between the fewest and the most; FP8 has
    one.
    """
    ranks = 0 if problem.scaled else problem.world_size
    chunk = ranks * K_TILES_MIN * hopper_config.TILE.block_k
    return [count * chunk for count in range(2, ranks - 1) if count * chunk > longer_than]


def of_calls(problem: Problem, plan: Plan, space: Workspace) -> Iterator[Code]:
    """Of calls of the problem, and in backward of what runs beside them; with and without a bias,
    and with gathered rows that are borrowed or not.
    """
    build = registry.strategy(problem, plan.strategy).BUILDERS[problem.pattern]
    gathers = problem.spec.gathers
    for borrows in (False, True) if gathers else (False,):
        for biased in (False, True) if gathers and not problem.is_backward else (False,):
            yield from launched(build, problem, plan, space, borrows, biased)
    if problem.is_backward and problem.spec.scatters and not problem.scaled:
        gather, gather_plan = registry.gather_beside(plan)
        yield from launched(gather, problem.dual, gather_plan, space, True, False)


def launched(
    build: Builder, problem: Problem, plan: Plan, space: Workspace, borrows: bool, biased: bool
) -> Iterator[Code]:  # fmt: skip
    x, w, bias, scaling = _operands(problem, space.device)
    given = x, w, bias if biased else None, problem.layout, borrows, scaling
    program = CallProgram(space, plan, *given).built_by(build)
    for segment in program.segments:
        for _, steps in segment:
            for step in steps:
                if isinstance(step, Launch):
                    yield step.launcher.code(step.tensors, step.numbers)


def _operands(problem: Problem, device: torch.device) -> tuple[Slot, Slot, Slot, Scaling | None]:
    """What stands for x, w, a bias and the scales of both."""
    here: Any = SimpleNamespace(device=device, is_cuda=device.type == "cuda")
    rows, N, K = problem.x_rows, problem.N_local, problem.K_local
    dtype = getattr(torch, problem.dtype)
    out_dtype = getattr(torch, problem.out_dtype) if problem.scaled else dtype
    x = Slot(here, X, (rows, K), dtype)
    w_dtype = torch.float8_e4m3fn if problem.scaled else dtype
    w = Slot(here, W, (N, K) if problem.layout == "nt" else (K, N), w_dtype)
    bias = Slot(here, BIAS, (N,), out_dtype)
    if not problem.scaled:
        return x, w, bias, None
    shapes = block_shapes(rows, N, K) if problem.blockwise else ((1,), (1,))
    scales: Any = [SimpleNamespace(shape=shape) for shape in shapes]
    kinds = problem.split_accumulator, problem.blockwise, problem.wire
    return x, w, bias, Scaling(scales[0], scales[1], out_dtype, *kinds)
