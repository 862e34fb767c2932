"""What a layer of pretrain_gpt.py takes the host, with stock linear layers and with ours.

    python -m flux_megatron.lab.measure.host_time path/to/Megatron-LM host_time.jsonl --tp 2 \
        --M 2048

Runs the comparison of `iterations.py` for a few blocks with a clock around calls of rank 0: nothing
waits for the GPU in them, so their times are the host's. Where a layer takes the GPU less than
that, the GPU waits. Appends a row for each timed iteration: mean us of a call, by part.
"""

from __future__ import annotations

import functools
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from flux_megatron.lab.measure import iterations

TIMED = [13, 14, 15, 18, 19, 20]  # of the last two blocks


@dataclass
class Clock:
    """What calls took, by part."""

    calls: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def around(self, owner: type, name: str, part: str) -> None:
        """Time all calls of a method, static or not, that `owner` has or inherits."""
        found = next(vars(one)[name] for one in owner.__mro__ if name in vars(one))
        static = isinstance(found, staticmethod)
        timed = self._timed(found.__func__ if static else found, part)
        setattr(owner, name, staticmethod(timed) if static else timed)

    def _timed(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*given: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*given, **named)
            finally:
                self.calls[part].append(1e6 * (time.perf_counter() - begin))

        return timed

    def means_us(self) -> dict[str, float]:
        return {part: round(sum(us) / len(us), 1) for part, us in self.calls.items()}


def parts() -> list[tuple[type, str, str]]:
    """Class, method, and what it is called in rows. Forward parts contain those below them."""
    from megatron.core.tensor_parallel import layers as stock
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from flux_megatron.integration import layers, norm
    from flux_megatron.nn import functions

    autograd = stock.LinearWithGradAccumulationAndAsyncCommunication
    return [
        (TransformerLayer, "forward", "layer"),
        (layers.FluxColumnParallelLinear, "forward", "column linear"),
        (layers.FluxRowParallelLinear, "forward", "row linear"),
        (norm.LayerNorm, "forward", "norm"),
        (norm.RMSNorm, "forward", "norm"),
        (functions._ColumnParallel, "backward", "column linear, backward"),
        (functions._RowParallel, "backward", "row linear, backward"),
        (autograd, "backward", "stock linear, backward"),
    ]


def time_iterations(train_step: Callable[..., Any], out: Path) -> Callable[..., Any]:
    """`train_step` that appends a line a timed iteration to `out`."""
    from flux_megatron.integration import arm

    count, clock = 0, Clock()
    for part in parts():
        clock.around(*part)

    @functools.wraps(train_step)  # others look for its parameters by name
    def timing(*given: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        clock.calls.clear()
        result = train_step(*given, **named)
        if count in TIMED:
            name = "stock" if arm.stock_now() else "flux"
            row = {"arm": name, "iteration": count, "mean_us": clock.means_us()}
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        return result

    return timing


def rank(gate: Path, script: str, arguments: list[str]) -> None:
    iterations.recording_rank(gate, script, arguments, time_iterations)


def main(
    checkout: Path, out: Path, tp: int = 4, commit: str = "unknown",
    M: Annotated[str, typer.Option("--M")] = "2048", layers: int = 0,
) -> None:  # fmt: skip
    """Time the host's part of every model's layers at every M, of `layers` if given."""
    machine = iterations.machine_of(checkout, commit)
    for rows in map(int, M.split(",")):
        for experiment in iterations.EXPERIMENTS:
            job = next(iterations.jobs(experiment, rows, tp, (), layers=layers))
            known = {"model": job.workload.model.name, "M": job.M, "tp": tp}
            with tempfile.TemporaryDirectory() as folder:
                timed = iterations.recorded(job, checkout, Path(folder, "0"), __file__)
            with out.open("a") as file:
                for line in timed:
                    print(known["model"], line)
                    row = {"what": "host_time", **known, **line, **machine}
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    iterations.as_rank_or_command(rank, main)
