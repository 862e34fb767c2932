"""Shapes that no plan was tuned for: every plan of the tuner's, beside the library and NCCL.

    torchrun --nproc-per-node=2 -m flux_megatron.lab.measure.held_out out.jsonl --commit COMMIT
    torchrun --nproc-per-node=2 -m flux_megatron.lab.measure.held_out out.jsonl --beside \
        --cases "gemm_rs 64x8x4"
    TRITON_INTERPRET=1 torchrun \
        --nproc-per-node=2 -m flux_megatron.lab.measure.held_out out.jsonl --device cpu

A case is a pattern and local M x N x K, w as in a layer's forward. Plans are those that `tune`
measures. Each is verified on small integers, every bit; then all race on random numbers, `gemm`
without communication, `serial` and `auto`, what an unmeasured call gets, among them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import typer
from torch import Tensor

from flux_megatron import ops
from flux_megatron.lab.measure import gpu_run
from flux_megatron.lab.measure.gpu_run import Run
from flux_megatron.overlap import registry
from flux_megatron.problem import Pattern, Plan, Problem
from flux_megatron.symm.workspace import workspace
from flux_megatron.tuning import tuner

CASES = (
    "ag_gemm 1536x2560x8192,ag_gemm 8192x1536x4096,ag_gemm 496x12288x12288,ag_gemm 112x2560x8192,"
    "ag_gemm 112x12288x12288,gemm_rs 8192x4096x1024,gemm_rs 1536x8192x2048,gemm_rs 496x12288x12288,"
    "gemm_rs 112x8192x4096,gemm_rs 112x12288x12288,ag_gemm 256x12288x12288,gemm_rs 256x12288x12288,"
    "ag_gemm 2048x3072x12288,gemm_rs 2048x12288x3072"
)
SMALL = "ag_gemm 4x6x8,gemm_rs 4x6x8"


class Layer:
    """Operands on this rank."""

    def __init__(self, run: Run, case: str) -> None:
        pattern, sizes = case.split()
        M, N, K = map(int, sizes.split("x"))
        self.group, R = run.group, run.group.size()
        self.gathers = Pattern(pattern).spec.gathers
        rows = M // R if self.gathers else M
        options = {"device": run.device, "dtype": getattr(torch, run.about.dtype)}
        self.x, self.w = torch.empty(rows, K, **options), torch.empty(N, K, **options)
        made = torch.Generator(run.device).manual_seed(1 + run.group.rank())
        gpu_run.fill_whole(made, self.x, self.w)
        self.gathered = self.x.new_empty(M, K) if self.gathers else self.x
        self.scattered = self.x.new_empty(M // R, N)
        self.problem = Problem.of_operands(
            Pattern(pattern), rows, N, K, run.about.dtype, R, "nt", run.device.type
        )

    def gemm(self) -> Tensor:
        return self.gathered @ self.w.t()

    def serial(self) -> Tensor:
        if self.gathers:
            dist.all_gather_into_tensor(self.gathered, self.x, group=self.group)
            return self.gemm()
        dist.reduce_scatter_tensor(self.scattered, self.gemm(), group=self.group)
        return self.scattered

    def call(self, plan: Plan | None) -> Tensor:
        return ops.OPERATIONS[self.problem.pattern](self.x, self.w, self.group, plan=plan)

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
    gpu_run.fill_random(layer.x, layer.w)
    calls |= {"gemm": layer.gemm, "serial": layer.serial}
    run.say(case)
    return gpu_run.race_rows(
        run, "held_out", calls, rounds, beside, lambda _, us: (us["serial"], us["gemm"]),
        lambda name, race: {"case": case, "plan": name, "outlived": race.outlived.get(name, 0)},
    )  # fmt: skip


def main(
    out: Path, commit: str = "", device: str = "cuda", cases: str = CASES, rounds: int = 12,
    beside: bool = False, seconds: float = 100,
) -> None:  # fmt: skip
    """Be one of the ranks."""
    small = device == "cpu"
    run = gpu_run.start_on(device, out, commit, seconds, beside)
    gpu_run.measure_each(
        run, (SMALL if small else cases).split(","),
        lambda case: measure(run, case, 1 if small else rounds, beside),
    )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
