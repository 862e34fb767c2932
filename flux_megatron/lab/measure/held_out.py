"""Shapes that no plan was tuned for: every plan of the tuner's, beside the library and NCCL.

    torchrun --nproc-per-node=2 -m flux_megatron.lab.measure.held_out out.jsonl --commit COMMIT
    torchrun --nproc-per-node=2 -m flux_megatron.lab.measure.held_out out.jsonl --beside \
        --cases "gemm_rs 64x8x4"
    TRITON_INTERPRET=1 torchrun \
        --nproc-per-node=2 -m flux_megatron.lab.measure.held_out out.jsonl --device cpu

A case is a pattern and local M x N x K, w as in a layer's forward. Plans are those that `tune`
measures. Each is verified on small integers, every bit; then all race on random numbers, `gemm`
without communication, `serial` and `auto`, what an unmeasured call gets, among them. A line a case
and plan: us, and E.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import typer
from torch import Tensor

from flux_megatron import ops, settings
from flux_megatron.lab.measure import gpu_run
from flux_megatron.lab.measure.gpu_run import Run
from flux_megatron.overlap import registry
from flux_megatron.problem import Pattern, Plan, Problem
from flux_megatron.symm.workspace import workspace
from flux_megatron.tuning import tuner
from flux_megatron.tuning.timing import race

CASES = (
    "ag_gemm 1536x2560x8192,ag_gemm 8192x1536x4096,ag_gemm 496x12288x12288,ag_gemm 112x2560x8192,"
    "ag_gemm 112x12288x12288,gemm_rs 8192x4096x1024,gemm_rs 1536x8192x2048,gemm_rs 496x12288x12288,"
    "gemm_rs 112x8192x4096,gemm_rs 112x12288x12288,ag_gemm 256x12288x12288,gemm_rs 256x12288x12288,"
    "ag_gemm 2048x3072x12288,gemm_rs 2048x12288x3072"
)
SMALL = "ag_gemm 4x6x8,gemm_rs 4x6x8"


class Layer:
    """Operands on this rank: whole numbers, of which bf16 has every sum."""

    def __init__(self, run: Run, case: str) -> None:
        pattern, sizes = case.split()
        self.M, N, K = map(int, sizes.split("x"))
        self.group, R = run.group, run.group.size()
        self.gathers = Pattern(pattern).spec.gathers
        made = torch.Generator(run.device).manual_seed(1 + run.group.rank())

        def whole(*size: int) -> Tensor:
            drawn = torch.randint(-8, 9, size, generator=made, device=run.device)
            return (drawn.sign() * (drawn.abs() == 8)).to(getattr(torch, run.about.dtype))

        rows = self.M // R if self.gathers else self.M
        self.x, self.w = whole(rows, K), whole(N, K)
        self.gathered = self.x.new_empty(self.M, K) if self.gathers else self.x
        self.scattered = self.x.new_empty(self.M // R, N)
        self.problem = Problem.of_operands(
            Pattern(pattern), rows, N, K, run.about.dtype, R, "nt", run.device.type
        )

    def renew(self) -> None:
        """Random numbers: of few ones a GEMM draws less power, and is faster than in training."""
        for tensor in (self.x, self.w):
            tensor.normal_()

    def gemm(self) -> Tensor:
        return self.gathered @ self.w.t()

    def serial(self) -> Tensor:
        if self.gathers:
            dist.all_gather_into_tensor(self.gathered, self.x, group=self.group)
            return self.gemm()
        dist.reduce_scatter_tensor(self.scattered, self.gemm(), group=self.group)
        return self.scattered

    def call(self, plan: Plan | None) -> Tensor:
        operation = ops.all_gather_gemm if self.gathers else ops.gemm_reduce_scatter
        return operation(self.x, self.w, self.group, plan=plan)

    def plans(self, device: torch.device) -> list[Plan]:
        unavailable = workspace(self.group, device).unavailable
        names, _ = registry.overlapping(self.problem, "auto", unavailable)
        return tuner.candidates(self.problem, names)


def measure(run: Run, case: str, rounds: int, beside: bool) -> bool:
    """Whether every plan of the case is exact; only then they race."""
    layer = Layer(run, case)
    expected = layer.serial().clone()
    calls: dict[str, Callable[[], Tensor]] = {"auto": partial(layer.call, None)}
    calls |= {plan.dumps(): partial(layer.call, plan) for plan in layer.plans(run.device)}
    wrong = torch.tensor([float((call() != expected).sum()) for call in calls.values()])
    if run.slowest(wrong).any():
        run.say(f"{case} WRONG: {dict(zip(calls, wrong.tolist(), strict=True))}")
        return False
    layer.renew()
    calls |= {"gemm": layer.gemm, "serial": layer.serial}
    result = race(calls, group=run.group, device=run.device, rounds=rounds, beside=beside)
    us = {name: result.median_us(name) for name in result.times_us}
    exposed = us["serial"] - us["gemm"]
    for name in sorted(us, key=us.__getitem__):
        E = round((us["serial"] - us[name]) / exposed, 3)
        run.row(
            "held_out", case=case, beside=beside, plan=name, median_us=round(us[name], 1), E=E,
            times_us=[round(one, 1) for one in result.times_us[name]],
            outlived=result.outlived.get(name, 0),
        )  # fmt: skip
    best = min((name for name in us if name not in ("gemm", "auto")), key=us.__getitem__)
    shown = "  ".join(f"{name} {us[name]:.1f}" for name in ("gemm", "serial", "auto"))
    run.say(f"{case:28} {shown}  best {us[best]:.1f} E {(us['serial'] - us[best]) / exposed:.2f} "
            f"of {len(us)}: {best}")  # fmt: skip
    return not result.failures


def main(
    out: Path, commit: str = "", device: str = "cuda", cases: str = CASES, rounds: int = 12,
    beside: bool = False, seconds: float = 100,
) -> None:  # fmt: skip
    """Be one of the ranks. One case after the other, until `seconds` are over."""
    small = device == "cpu"
    os.environ["FLUX_MEGATRON_BESIDE"] = str(int(beside))  # by which `auto` chooses
    settings.reload()
    run = gpu_run.start_on(device, out, commit, seconds)
    for case in (SMALL if small else cases).split(","):
        if not run.time_left():
            run.say("no time for the others")
            break
        if not measure(run, case, 1 if small else rounds, beside):
            gpu_run.finish(run, 1)
    gpu_run.finish(run)


if __name__ == "__main__":
    typer.run(main)
