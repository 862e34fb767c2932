"""How long do the first steps of a run take, and what for?

    torchrun --nproc-per-node=2 -m flux_megatron.lab.measure.first_steps out.jsonl --commit COMMIT
    TRITON_INTERPRET=1 torchrun --nproc-per-node=2 \
        -m flux_megatron.lab.measure.first_steps out.jsonl --device cpu

A step calls a layer's four linears of `flux_megatron.nn`, forward and backward, with another M in
each; torch has had a backward of its own before, whose imports take seconds. A cold start has empty
folders in TRITON_CACHE_DIR and FLUX_MEGATRON_CACHE, a warm one those of the run before. A row has
the seconds of each step, and the kernels that this process compiled meanwhile, by stage.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
import typer

from flux_megatron.kernels.sizes import cdiv
from flux_megatron.lab.measure import gpu_run
from flux_megatron.lab.measure.dynamic_layers import MODELS, Layer
from flux_megatron.lab.measure.gpu_run import Run

STEPS = "4096,4096,4096,2048,1434,8192,16000,2866,1000,512,4096"
SMALL_STEPS = "64,64,96,34"


class Log:
    """What this process compiles: (seconds since the beginning, what, seconds it took)."""

    def __init__(self) -> None:
        self.events: list[tuple[float, str, float]] = []
        self.began = time.monotonic()
        triton.knobs.compilation.listener = self._kernel

    def now(self) -> float:
        return round(time.monotonic() - self.began, 2)

    def _note(self, what: str, seconds: float) -> None:
        self.events.append((self.now(), what, round(seconds, 2)))

    def _kernel(self, *, src: Any, times: Any, cache_hit: bool, **_: object) -> None:
        if not cache_hit:
            stages = " ".join(f"{name} {us / 1e6:.2f}" for name, us in times.lowering_stages)
            self._note(
                f"{src.name}: ir {times.ir_initialization / 1e6:.2f} {stages}", times.total / 1e6
            )

    @contextmanager
    def step(self) -> Iterator[dict[str, Any]]:
        found: dict[str, Any] = {}
        before, started = len(self.events), time.monotonic()
        yield found
        found["seconds"] = round(time.monotonic() - started, 2)
        found["compiled"] = self.events[before:]


def measure(run: Run, model: str, log: Log, Ms: list[int]) -> bool:
    layer, steps = Layer(run, MODELS[model], max(Ms), True), []
    one = torch.ones(1, device=run.device, requires_grad=True)
    (2 * one).backward(torch.ones_like(one))
    dist.barrier(group=run.group)  # connects the ranks
    for M in Ms:
        layer.take(M)
        with log.step() as found:
            layer.ours()
            run.synchronize()
        slowest = run.slowest(torch.tensor([found["seconds"]])).item()
        steps.append({"M": M, "slowest_s": round(slowest, 2), **found})
        run.say(f"M={M}: {slowest:.2f} s, {len(found['compiled'])} compiled on rank 0")
        for at, what, seconds in found["compiled"]:
            run.say(f"    at {at:6.2f} s: {seconds:5.2f} s {what}")
    run.row("first_steps", model=model, steps=steps)
    return True


def main(
    out: Path, commit: str = "", device: str = "cuda", model: str = "", steps: str = "",
    seconds: float = 240,
) -> None:  # fmt: skip
    """Be one of the ranks."""
    log = Log()
    run = gpu_run.start_on(device, out, commit, seconds)
    small = device == "cpu"
    wanted = [int(one) for one in (steps or (SMALL_STEPS if small else STEPS)).split(",")]
    Ms = [cdiv(M, run.group.size()) * run.group.size() for M in wanted]
    given = model or ("small" if small else "qwen3-8b")
    run.say(f"joined after {log.now()} s")
    gpu_run.measure_each(run, given.split(","), lambda one: measure(run, one, log, Ms))


if __name__ == "__main__":
    typer.run(main)
