"""The GEMM inside `low_latency`, on one GPU: its kernel with each of its tiles beside the library.

    python tests/gpu/few_rows.py few_rows.jsonl
    python tests/gpu/few_rows.py few_rows.jsonl --rows 64 --shapes "8192x4096 nt"
    python tests/gpu/few_rows.py few_rows.jsonl --gathers

The kernel of GEMM+AR, or that of AG+GEMM with `--gathers`, runs for a group of one rank: it
multiplies, sends its words to itself and takes them. So what it takes beyond the library's GEMM is
its own GEMM and the words' way through this GPU's memory; what they take between GPUs is not in it.
Every tile is first verified on small whole numbers, every bit; then all of a shape race on random
ones, in CUDA graphs of calls with as many weights as L2 does not hold. A line a shape: the
library's us, then each tile's share of its speed, the fastest first, and an asterisk at the default
one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from gemm_tiles import Multiply, Operands, Shape, line, raced, start
from torch import Tensor

from flux_megatron.kernels import ag_gemv, gemv_ar
from flux_megatron.kernels.sizes import parts_of
from flux_megatron.overlap import low_latency, low_latency_plans
from flux_megatron.problem import Pattern, Plan, Problem
from flux_megatron.symm import signals

SHAPES = (
    "8192x2048 nt,8192x4096 nt,8192x14336 nt,12288x6144 nt,2560x8192 nt,5120x8192 nt,"
    "14336x8192 nt,28672x8192 nt,18432x12288 nt,8192x4096 nn,12288x6144 nn"
)  # N x K of a rank, and the layout of w


def name_of(plan: Plan) -> str:
    tile = plan.tile
    more = f"{', TMA' * tile.tma}{', 8 warps' * (tile.num_warps == 8)}"
    more += f", {plan.splits} parts" * bool(plan.splits)
    return f"{tile.block_n}x{tile.block_k}, {tile.num_stages} stages{more}"


def problem_of(
    shape: Shape, device: torch.device, dtype: torch.dtype, pattern: Pattern = Pattern.GEMM_AR
) -> Problem:
    kind = str(dtype).removeprefix("torch.")
    return Problem(pattern, shape.M, shape.N, shape.K, kind, 1, shape.layout, device=device.type)


def plans_of(problem: Problem) -> list[Plan]:
    """What the tuner tries, without parts of K too, and with the default of other GPUs."""
    plans = low_latency.candidates(problem)
    plans = [replace(plan, two_phase=False) for plan in plans]
    plans += [replace(plan, splits=0) for plan in plans]
    with mock.patch.object(low_latency_plans, "_on_hopper", return_value=False):
        plans.append(low_latency.default_plan(problem))
    return [*dict.fromkeys(plans)]


def calls_of(
    operands: Operands, device: torch.device, dtype: torch.dtype, pattern: Pattern
) -> dict[str, Multiply]:
    """The library is first."""
    shape, x = operands.shape, operands.x
    gathers = pattern is Pattern.AG_GEMM
    if gathers:
        half_bytes = ag_gemv.half_bytes(shape.M, shape.K, dtype)
    else:
        half_bytes = gemv_ar.half_bytes(shape.M, shape.N, dtype, 1)
    words = torch.zeros(2 * half_bytes, dtype=torch.uint8, device=device)
    gathered, counts = torch.empty_like(x), {"dtype": torch.int32, "device": device}
    belong = {
        "word_pointers": torch.tensor([words.data_ptr()], device=device), "half_bytes": half_bytes,
        "epochs": torch.zeros(1, **counts), "work": torch.zeros(2 * signals.WORK_WORDS, **counts),
        "counters": torch.zeros(signals.PARTIAL_COUNTERS, **counts),
        "status": torch.zeros(64, **counts), "rank": 0, "timeout_ns": 10**9,
        "layout": shape.layout,
    }  # fmt: skip
    if gathers:
        belong["arrivals"] = torch.zeros(2, **counts)
    else:
        belong["world_size"] = 1

    def with_plan(plan: Plan) -> Multiply:
        made = {"tile": plan.tile, "parts": parts_of(plan.splits, shape.N, plan.tile)}

        def call(w: Tensor, kept: Tensor = words) -> Tensor:  # a pointer keeps nothing alive
            if gathers:
                return ag_gemv.ag_gemv(x, gathered, w, None, **made, **belong)
            return gemv_ar.gemv_ar(x, w, **made, **belong)

        return call

    plans = plans_of(problem_of(shape, device, dtype, pattern))
    return {"library": operands.library, **{name_of(plan): with_plan(plan) for plan in plans}}


def compiled(shape: Shape, pattern: Pattern) -> None:
    """Every kernel of a shape: Triton keeps them on disk, for the process that measures."""
    device = torch.device("cuda", 0)
    operands = Operands(shape, device, torch.bfloat16)
    for call in calls_of(operands, device, torch.bfloat16, pattern).values():
        call(operands.ws[0])
    torch.cuda.synchronize()


def measure(
    shape: Shape, device: torch.device, rounds: int, dtype: torch.dtype = torch.bfloat16,
    pattern: Pattern = Pattern.GEMM_AR,
) -> Iterator[dict]:  # fmt: skip
    """A row for each candidate."""
    operands = Operands(shape, device, dtype)
    default = name_of(low_latency.default_plan(problem_of(shape, device, dtype, pattern)))
    for row in raced(operands, calls_of(operands, device, dtype, pattern), device, rounds):
        row["default"] = row["tile"] == default
        yield {"table": "few_rows", "pattern": pattern, **row}


def main(
    out: Path, rows: str = "1,8,16,32,64,128", shapes: str = SHAPES, rounds: int = 12,
    seconds: float = 100, commit: str = "", compilers: int = 14, gathers: bool = False,
) -> None:  # fmt: skip
    """Measure on the first GPU until `seconds` are over, and append the rows to `out`."""
    end = time.monotonic() + seconds
    device, pattern = start(), Pattern.AG_GEMM if gathers else Pattern.GEMM_AR
    wanted = [
        Shape.of(f"{M}x{shape}") for M in map(int, rows.split(",")) for shape in shapes.split(",")
    ]
    with ProcessPoolExecutor(compilers, mp_context=mp.get_context("spawn")) as pool:
        [*pool.map(compiled, wanted, [pattern] * len(wanted))]
    with out.open("a") as file:
        for shape in wanted:
            if time.monotonic() > end:
                print("no time for the others")
                break
            measured = measure(shape, device, rounds, pattern=pattern)
            made = [{**row, "commit": commit} for row in measured]
            file.writelines(json.dumps(row) + "\n" for row in made)
            print(line(made, "default"), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
