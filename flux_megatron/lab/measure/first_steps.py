"""How long do the first steps of a run take, and how many kernels does a process compile in each?

    torchrun --nproc-per-node=2 -m flux_megatron.lab.measure.first_steps out.jsonl --commit COMMIT
    TRITON_INTERPRET=1 torchrun --nproc-per-node=2 \
        -m flux_megatron.lab.measure.first_steps out.jsonl --device cpu

A step calls a layer's four linears of `flux_megatron.nn`, forward and backward, with another M in
each; torch has had a backward of its own before, whose imports take seconds. A cold start has empty
folders in TRITON_CACHE_DIR and FLUX_MEGATRON_CACHE, a warm one those of the run before. A row has
the seconds of each step on the slowest rank, and the kernels that rank 0 compiled meanwhile. With
FLUX_MEGATRON_TUNE=met each range of M is compiled and raced when it comes.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
import typer

from flux_megatron import settings
from flux_megatron.kernels.sizes import cdiv
from flux_megatron.lab.measure import gpu_run
from flux_megatron.lab.measure.dynamic_layers import MODELS, Layer
from flux_megatron.lab.measure.dynamic_rows import Kernels
from flux_megatron.lab.measure.gpu_run import Run

STEPS = "4096,4096,4096,2048,1434,8192,16000,2866,1000,512,4096"
SMALL_STEPS = "64,64,96,34"


def measure(run: Run, model: str, Ms: list[int]) -> bool:
    layer, kernels, steps = Layer(run, MODELS[model], max(Ms), True), Kernels(), []
    one = torch.ones(1, device=run.device, requires_grad=True)
    (2 * one).backward(torch.ones_like(one))
    dist.barrier(group=run.group)  # connects the ranks
    for M in Ms:
        layer.take(M)
        known, began = kernels.compiled, time.monotonic()
        layer.ours()
        run.synchronize()
        slowest = run.slowest(torch.tensor([time.monotonic() - began])).item()
        compiled = kernels.compiled - known
        steps.append({"M": M, "slowest_s": round(slowest, 2), "compiled": compiled})
        run.say(f"M={M}: {slowest:.2f} s, {compiled} compiled on rank 0")
    run.row("first_steps", model=model, tune=settings.get().tune, steps=steps)
    return True


def main(
    out: Path, commit: str = "", device: str = "cuda", model: str = "", steps: str = "",
    seconds: float = 240,
) -> None:  # fmt: skip
    """Be one of the ranks."""
    run = gpu_run.start_on(device, out, commit, seconds)
    small = device == "cpu"
    wanted = [int(one) for one in (steps or (SMALL_STEPS if small else STEPS)).split(",")]
    Ms = [cdiv(M, run.group.size()) * run.group.size() for M in wanted]
    given = model or ("small" if small else "qwen3-8b")
    gpu_run.measure_each(run, given.split(","), lambda one: measure(run, one, Ms))


if __name__ == "__main__":
    typer.run(main)
