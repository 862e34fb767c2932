"""Run folders as `flux-megatron launch` and Megatron leave them, written by hand."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

from flux_megatron.lab.results.iterations import Iteration
from flux_megatron.launch import run_folder
from flux_megatron.launch.experiment import Experiment


def correlated(seed: int, n: int, rho: float, median: float = 0.2, spread: float = 0.02):
    """`n` step times, their logarithms a first-order autoregressive process."""
    draw = random.Random(seed).gauss
    level, times = draw(0, 1), []
    for _ in range(n):
        level = rho * level + math.sqrt(1 - rho * rho) * draw(0, 1)
        times.append(median * math.exp(spread * level))
    return times


def losses(n: int) -> list[float]:
    return [2 + 8 * math.exp(-i / 20) for i in range(1, n + 1)]


def megatron_line(
    number: int,
    seconds: float,
    loss: float | None,
    release: tuple[int, int] = (0, 16),
    clock: int = 0,
    skipped: int = 0,
    nan: int = 0,
    batch: int = 8,
) -> str:
    """As training_log of a release prints it; `clock` is seconds after an arbitrary time."""
    minutes, rest = divmod(clock, 60)
    fraction = ".123456" if release >= (0, 16) else ""
    if loss is None and skipped and release >= (0, 17):
        loss = 0.0
    loss_field = "" if loss is None or math.isnan(loss) else f" lm loss: {loss:.6E} |"
    return (
        f" [2026-11-21 {10 + minutes // 60:02d}:{minutes % 60:02d}:{rest:02d}{fraction}]"
        f" iteration {number:8d}/{100:8d} | consumed samples: {number * batch:12d} |"
        f" elapsed time per iteration (ms): {seconds * 1e3:.1f} | learning rate: {1e-4:.6E} |"
        f" global batch size: {batch:5d} |{loss_field} loss scale: 1.0 | grad norm: 1.234 |"
        f" number of skipped iterations: {skipped:3d} | number of nan iterations: {nan:3d} |"
    )


def megatron_process(
    times: Sequence[float], curve: Sequence[float], first: int = 1, clock: int = 0
) -> str:
    """The log of one process that starts at iteration `first`; --log-interval 1."""
    lines = ["> loading checkpoint", "training ..."]
    for i, (seconds, loss) in enumerate(zip(times, curve, strict=True)):
        if i == 1:  # the mean of both, printed a second time
            seconds, loss = (seconds + times[0]) / 2, (loss + curve[0]) / 2
        lines.append(megatron_line(first + i, seconds, loss, clock=clock + i))
    return "\n".join(lines) + "\n"


def train_rows(iterations: Sequence[Iteration]) -> str:
    return "".join(
        json.dumps({"step": i.number, "loss": i.loss, "lr": 1e-4, "seconds": i.seconds}) + "\n"
        for i in iterations
    )


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def run_folder_of(folder: Path, experiment: Experiment) -> Path:
    """What `launch` writes before anything runs, less the scripts."""
    run_folder.write(folder, experiment, run_folder.Given(), {})
    return folder


def megatron_run(folder: Path, experiment: Experiment, times: dict[str, Sequence[float]]) -> Path:
    """A finished run of a `pretrain_gpt` experiment; all arms have the same losses."""
    run_folder_of(folder, experiment)
    batch = next(iter(experiment.arms.values())).training.global_batch
    for arm, seconds in times.items():
        text = megatron_process(seconds, losses(len(seconds)))
        text = text.replace("batch size:     8", f"batch size: {batch:5d}")
        write(folder / arm / "logs" / "node-0" / "1-0_x" / "attempt_0" / "7" / "stdout.log", text)
    return folder
