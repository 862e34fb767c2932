"""Where an iteration of pretrain_gpt.py spends its time.

    python -m flux_megatron.lab.measure.breakdown path/to/Megatron-LM breakdown.jsonl --tp 2 \
        --M 8192,2048
    python -m flux_megatron.lab.measure.breakdown path/to/Megatron-LM breakdown.jsonl --tp 2 \
        --M 2048 --micro-batches 8 --layers 2

Runs the comparison of `iterations.py` (stock and ours in turn) for a few blocks. Iterations of each
arm are recorded by torch's profiler, GPU activity alone, on rank 0: what kernels of each kind take,
how long nothing but communication runs, how long nothing at all. Appends rows to the file.
"""

from __future__ import annotations

import functools
import json
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from flux_megatron.lab.bench.trace import length, union
from flux_megatron.lab.measure import megatron_jobs
from flux_megatron.lab.measure.iterations import machine_of
from flux_megatron.lab.measure.megatron_jobs import BLOCK, EXPERIMENTS, Process

RECORDED = [*range(13, 16), *range(18, 21)]  # of the last two blocks: three iterations of each arm
NAMES = 25
KINDS = {
    "collective": r"nccl",
    "wait": r"wait_sources|rank_barrier|announce",
    "attention": r"sdpa|flash|fmha|attention",
    "optimizer": r"multi_tensor|adam|l2norm|normtwo",  # the last looks for NaN in gradients
    "norm": r"norm",
    "linear": r"gemm|nvjet|xmma|cutlass|cublas",
    "sum of parts": r"reduce_received",
    "copy": r"^memcpy|^memset",
}  # the first that is found; "other" otherwise
COMMUNICATION = ("collective", "wait", "copy")


@dataclass(frozen=True)
class Activity:
    """Something that ran on the GPU, in us."""

    name: str
    begin: float
    end: float

    @property
    def kind(self) -> str:
        name = self.name.lower()
        return next((kind for kind, words in KINDS.items() if re.search(words, name)), "other")


def activities(trace: Path) -> list[Activity]:
    """Of a trace that torch's profiler exported, in the order of their beginnings."""
    events = json.loads(trace.read_text())["traceEvents"]
    found = [
        Activity(event["name"], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    return sorted(found, key=lambda one: one.begin)


def most(by_name: dict[str, float]) -> dict[str, int]:
    ordered = sorted(by_name.items(), key=lambda item: -item[1])
    return {name: round(us) for name, us in ordered[:NAMES]}


def shares(recorded: Sequence[Activity]) -> dict[str, Any]:
    """Times of an iteration in us. Kinds that run at once both count in `by_kind`; `idle_before`
    is how long nothing ran before activities of a name began; `in_turn` has each product and each
    collective as it came.
    """
    by_kind: dict[str, float] = defaultdict(float)
    by_name: dict[str, float] = defaultdict(float)
    idle_before: dict[str, float] = defaultdict(float)
    until = recorded[0].begin
    for one in recorded:
        by_kind[one.kind] += one.end - one.begin
        by_name[one.name[:90]] += one.end - one.begin
        idle_before[one.name[:90]] += max(0.0, one.begin - until)
        until = max(until, one.end)
    spans = [(one.begin, one.end) for one in recorded]
    busy = length(union(spans))
    computing = length(union((a.begin, a.end) for a in recorded if a.kind not in COMMUNICATION))
    span = max(one.end for one in recorded) - recorded[0].begin
    return {
        "span_us": round(span), "idle_us": round(span - busy),
        "communication_alone_us": round(busy - computing),
        "by_kind_us": {kind: round(us) for kind, us in sorted(by_kind.items())},
        "longest_us": most(by_name), "idle_before_us": most(idle_before),
        "in_turn_us": [
            (one.name[:40], round(one.end - one.begin))
            for one in recorded if one.kind in ("linear", "collective")
        ],
    }  # fmt: skip


def record_iterations(train_step: Callable[..., Any], out: Path) -> Callable[..., Any]:
    """`train_step` that appends a line a recorded iteration to `out`."""
    from flux_megatron.integration import arm

    count = 0

    @functools.wraps(train_step)  # the step check looks for its parameters' names
    def recording(*given: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if count not in RECORDED:
            return train_step(*given, **named)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            result = train_step(*given, **named)
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            profile.export_chrome_trace(f"{folder}/trace.json")
            recorded = activities(Path(folder, "trace.json"))
        name = "stock" if arm.stock_now() else "flux"
        row = {"arm": name, "iteration": count, **shares(recorded)}
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        return result

    return recording


def rank(gate: Path, script: str, arguments: list[str]) -> None:
    def prepare() -> None:
        import megatron.training.training as training

        if os.environ["RANK"] == "0":
            recorded = gate.with_name("recorded.jsonl")
            training.train_step = record_iterations(training.train_step, recorded)

    megatron_jobs.rank(gate, script, arguments, prepare)


def main(
    checkout: Path, out: Path, tp: int = 4, commit: str = "unknown",
    M: Annotated[str, typer.Option("--M")] = "8192,2048", micro_batches: int = 1,
    layers: int = 0, limit_s: float = 150,
) -> None:  # fmt: skip
    """Break down iterations of every model at every M; `iterations.py` has the other options."""
    machine = machine_of(checkout, commit)
    for rows in map(int, M.split(",")):
        for experiment in EXPERIMENTS:
            job = next(megatron_jobs.jobs(experiment, rows, tp, (), micro_batches, layers=layers))
            # four blocks: stock, ours, stock, ours
            workload = job.workload
            workload = replace(workload, training=replace(workload.training, steps=4 * BLOCK))
            with tempfile.TemporaryDirectory() as folder:
                process = Process(
                    replace(job, workload=workload), checkout, Path(folder, "0"), __file__
                )
                process.begin()
                process.times_ms(limit_s)
                lines = Path(folder, "0", "recorded.jsonl").read_text().splitlines()
            known = {"model": workload.model.name, "M": job.M, "tp": tp}
            for line in lines:
                row = {"what": "breakdown", **known, "micro_batches": micro_batches,
                       **json.loads(line), **machine}  # fmt: skip
                with out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                kept = ("arm", "span_us", "idle_us", "communication_alone_us", "by_kind_us")
                print(known, {key: row[key] for key in kept}, flush=True)


if __name__ == "__main__":
    megatron_jobs.as_rank_or_command(rank, main)
