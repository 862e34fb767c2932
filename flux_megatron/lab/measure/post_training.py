"""Steps of a GRPO-like loop on megatron-core's GPT model: stock and ours in turn.

    CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node=2 \
        -m flux_megatron.lab.measure.post_training out.jsonl --commit COMMIT
    TRITON_INTERPRET=1 torchrun --nproc-per-node=2 \
        -m flux_megatron.lab.measure.post_training out.jsonl --device cpu

A case is a model and "sp" or "whole", which is without sequence parallelism. Random tokens stand
for generated ones. A step takes micro-batches of sequences that are packed to a random total; each
sequence attends to itself. First come log-probabilities under no_grad, then a training pass over
the same micro-batches with a clipped ratio, then Adam. Layers are few and have the model's widths.
Both arms share one model, its norms and its attention: `enable` built it, and the stock arm runs
megatron-core's own code in our layers.

Both arms first give log-probabilities that must agree. Then each step runs in both arms, the first
one alternates, and the slowest rank counts. A row a case: stock's time by ours with its 95 %
interval, of whole steps and of the two passes, without the first `SETTLED` steps; the share of our
calls that overlapped; the worst step of all others, as our time by stock's.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import typer

from flux_megatron.lab.measure import gpu_run
from flux_megatron.lab.measure.gpu_run import Run
from flux_megatron.lab.measure.post_training_loop import (
    IN_SMALL,
    SEED,
    WHOLE,
    Loop,
    MicroBatch,
    Size,
)
from flux_megatron.overlap.report import report, reset_report

CASES = "qwen3-8b sp,qwen3-8b whole,qwen3-32b sp,qwen3-32b whole"
SMALL = "small sp,small whole"
SETTLED = 5  # steps: plans of new sizes are chosen, kernels load
BOUND = {torch.bfloat16: 1e-2, torch.float32: 1e-5}  # of log-probabilities, relative


def agrees(run: Run, loop: Loop, batches: list[MicroBatch]) -> bool:
    """Whether both arms give the same log-probabilities, on every rank. Collective."""
    from flux_megatron.integration import arm

    found = []
    for stock in (True, False):
        with arm.use(stock=stock):
            found.append(loop.old(batches))
    apart = [float((a - b).abs().mean() / a.abs().mean()) for a, b in zip(*found, strict=True)]
    worst = run.slowest(torch.tensor([max(apart)])).item()
    good = worst <= BOUND[getattr(torch, run.about.dtype)]
    run.say(f"  log-probabilities are {worst:.1e} apart" + ("" if good else ": WRONG"))
    return good


def measure(run: Run, case: str, steps: int, size: Size) -> bool:
    """A row and a line, if both arms agree; whether they do."""
    from flux_megatron.integration.comparison import speedup

    name, way = case.split()
    loop, drawn = Loop(run, name, way == "sp", size), random.Random(SEED)
    run.say(case)
    if not agrees(run, loop, loop.draw(drawn)):
        return False
    times: list[dict[bool, list[float]]] = []
    for number in range(SETTLED + steps):
        if number == SETTLED:
            reset_report()
        batches, first = loop.draw(drawn), number % 2 == 0
        times.append({stock: loop.step(batches, stock) for stock in (first, not first)})
    settled, calls = times[SETTLED:], report()
    columns: dict[str, Any] = {}
    for part, of in {"log_probs": slice(0, 1), "train": slice(1, 2), "step": slice(0, 2)}.items():
        pairs = [([sum(one[True][of])], [sum(one[False][of])]) for one in settled]
        gained = speedup(pairs)
        low, high = gained.interval or (gained.ratio, gained.ratio)
        columns[f"speedup_{part}"] = [round(one, 4) for one in (low, gained.ratio, high)]
        run.say(f"  {part:10} {gained}")
    worst = max(sum(one[False]) / sum(one[True]) for one in settled)
    ms = {arm: [[round(1e3 * s, 3) for s in one[of]] for one in times]
          for arm, of in (("stock", True), ("ours", False))}  # fmt: skip
    run.row(
        "post_training", case=case, layers=size.layers, largest=size.largest,
        micro_batches=size.micro_batches, **columns, slowest_step=round(worst, 3),
        overlapped=calls.overlapped, calls=calls.total,
        fallbacks={f"{p}: {why}": n for (p, why), n in calls.fallbacks.items()},
        times_ms_stock=ms["stock"], times_ms_ours=ms["ours"],
    )  # fmt: skip
    run.say(f"  {calls.overlapped} of {calls.total} calls overlapped, slowest step {worst:.2f}x")
    return True


def main(
    out: Path, commit: str = "unknown", cases: str = "", steps: int = 20, layers: int = 0,
    device: str = "cuda", seconds: float = 540,
) -> None:  # fmt: skip
    """Measure the cases while `seconds` allow to begin another one. Exits 1 if one is wrong."""
    run = gpu_run.start_on(device, out, commit, seconds)
    small = device == "cpu"
    if small:
        from flux_megatron.lab.cpu import pretend_cuda

        pretend_cuda()
    whole = IN_SMALL if small else WHOLE
    size = Size(**{**vars(whole), "layers": layers or whole.layers})
    given = (cases or (SMALL if small else CASES)).split(",")
    gpu_run.measure_each(run, given, lambda case: measure(run, case, steps, size))


if __name__ == "__main__":
    typer.run(main)
