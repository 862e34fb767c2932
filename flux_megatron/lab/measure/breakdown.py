"""Where the time of a training step goes, by a trace of torch's profiler.

    python -m flux_megatron.lab.measure.breakdown breakdown.jsonl TRACE.json ...

Megatron-LM's pretrain_gpt.py writes such a trace of one iteration with `--profile
--use-pytorch-profiler --profile-step-start 13 --profile-step-end 14 --tensorboard-dir FOLDER`, and
`flux-megatron trace` one of a layer. A row a trace: what kernels of each kind take, how long
nothing but communication runs, how long nothing at all.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from flux_megatron.lab.bench.table_run import append
from flux_megatron.lab.bench.trace import length, union

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
    """Times of a step in us. Kinds that run at once both count in `by_kind`; `idle_before`
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


def main(out: Path, traces: list[Path]) -> None:
    """Append a row a trace, and print what is short."""
    for trace in traces:
        found = activities(trace)
        if not found:
            raise typer.BadParameter(f"{trace} has nothing that ran on a GPU")
        row = {"what": "breakdown", "trace": trace.name, **shares(found)}
        append(out, [row])
        kept = ("trace", "span_us", "idle_us", "communication_alone_us", "by_kind_us")
        print({key: row[key] for key in kept}, flush=True)


if __name__ == "__main__":
    typer.run(main)
