"""AG+GEMM of one layer: when the first rows come, and which tiles wait for them. Plans of `hopper`
that differ in the tile and in the communication tile, beside the library and what `auto` chooses.

    torchrun --nproc-per-node=2 tests/gpu/first_arrival.py out.jsonl --commit COMMIT
    torchrun --nproc-per-node=2 tests/gpu/first_arrival.py out.jsonl --device cpu   # rehearsal

Each plan is verified on small integers, every bit; then all of a shape race on random numbers. A
line a shape and plan: us, E, and what `tuning.gather_tiles` says of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import gpu_run
import torch
import torch.distributed as dist
import typer
from gpu_run import Run
from torch import Tensor

from flux_megatron import ops
from flux_megatron.kernels import hopper_config
from flux_megatron.overlap import registry
from flux_megatron.perf import hardware
from flux_megatron.problem import Pattern, Plan, Problem
from flux_megatron.tuning.gather_tiles import tiles_us
from flux_megatron.tuning.timing import race

# local M x N x K and layout: fewer tiles than SMs, a gather longer than the local GEMM, few waves
SHAPES = (
    "1536x2560x8192 nt,8192x1536x4096 nt,2048x6144x12288 nn,2048x3072x12288 nn,"
    "4096x3072x12288 nn,8192x14336x8192 nt"
)
SMALL = "4x6x8 nt,4x6x8 nn"
TILES = {
    "wide, groups of 16": replace(hopper_config.TILE, group_m=16),
    "wide, groups of 8": replace(hopper_config.TILE, group_m=8),
    "medium": hopper_config.MEDIUM,
    "narrow": hopper_config.NARROW,
}
PARTS = (1, 2, 4)  # of a shard, each with its push


class Layer:
    """Operands on this rank: whole numbers, of which bf16 has every sum."""

    def __init__(self, run: Run, shape: str) -> None:
        sizes, self.layout = shape.split()
        M, N, K = map(int, sizes.split("x"))
        self.group, R = run.group, run.group.size()
        made = torch.Generator(run.device).manual_seed(1 + run.group.rank())

        def whole(*size: int) -> Tensor:
            drawn = torch.randint(-8, 9, size, generator=made, device=run.device)
            return (drawn.sign() * (drawn.abs() == 8)).to(getattr(torch, run.about.dtype))

        self.x, self.w = whole(M // R, K), whole(*((N, K) if self.layout == "nt" else (K, N)))
        self.gathered = self.x.new_empty(M, K)
        self.problem = Problem.of_operands(
            Pattern.AG_GEMM, M // R, N, K, run.about.dtype, R, self.layout, run.device.type
        )

    def renew(self) -> None:
        """Random numbers: of few ones a GEMM draws less power, and is faster than in training."""
        for tensor in (self.x, self.w):
            tensor.normal_()

    def gemm(self) -> Tensor:
        return self.gathered @ (self.w.t() if self.layout == "nt" else self.w)

    def serial(self) -> Tensor:
        dist.all_gather_into_tensor(self.gathered, self.x, group=self.group)
        return self.gemm()

    def call(self, plan: Plan | None) -> Tensor:
        return ops.all_gather_gemm(self.x, self.w, self.group, layout=self.layout, plan=plan)

    def plans(self) -> dict[str, Plan]:
        if reason := registry.refusal(self.problem, "hopper", None):
            return {reason: Plan("sequential")}
        shard = self.problem.M_shard
        return {
            f"{name}, {parts} pushes": Plan("hopper", 0 if parts == 1 else shard // parts, tile)
            for name, tile in TILES.items()
            for parts in PARTS
        }


def measure(run: Run, shape: str, rounds: int) -> bool:
    """Whether every plan of the shape is exact; only then they race."""
    layer = Layer(run, shape)
    expected, plans = layer.serial(), layer.plans()
    calls: dict[str, Callable[[], Tensor]] = {"gemm": layer.gemm, "serial": layer.serial}
    calls |= {"auto": partial(layer.call, None)}
    calls |= {name: partial(layer.call, plan) for name, plan in plans.items()}
    wrong = torch.tensor([float((call() != expected).sum()) for call in calls.values()])
    if run.slowest(wrong).any():
        run.say(f"{shape} WRONG: {dict(zip(calls, wrong.tolist(), strict=True))}")
        return False
    layer.renew()
    result = race(calls, group=run.group, device=run.device, rounds=rounds)
    us = {name: result.median_us(name) for name in result.times_us}
    for name, time_us in us.items():
        share = (us["serial"] - time_us) / (us["serial"] - us["gemm"])
        plan = plans.get(name)
        told = tiles_us(layer.problem, plan, hardware.H200) if plan and plan.tile.tma else None
        run.row(
            "first_arrival", shape=shape, plan=name, median_us=time_us, E=round(share, 3),
            times_us=result.times_us[name], predicted_us=told,
        )  # fmt: skip
        run.say(f"{shape:22} {name:34}{time_us:9.1f} us  E {share:5.2f}  {told or 0:9.1f}")
    return not result.failures


def main(
    out: Path, commit: str = "", device: str = "cuda", shapes: str = SHAPES, rounds: int = 16,
    seconds: float = 75,
) -> None:  # fmt: skip
    """Be one of the ranks. One shape after the other, until `seconds` are over."""
    small = device == "cpu"
    run = gpu_run.start_on(device, out, commit, seconds)
    for shape in (SMALL if small else shapes).split(","):
        if not run.time_left():
            run.say("no time for the others")
            break
        if not measure(run, shape, 1 if small else rounds):
            gpu_run.finish(run, 1)
    gpu_run.finish(run)


if __name__ == "__main__":
    typer.run(main)
