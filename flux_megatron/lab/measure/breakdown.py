"""Where the time of a training step goes, by a trace of torch's profiler.

    python -m flux_megatron.lab.measure.breakdown breakdown.jsonl TRACE.json ...

Megatron-LM's pretrain_gpt.py writes such a trace of one iteration with `--profile
--use-pytorch-profiler --profile-step-start 13 --profile-step-end 14 --tensorboard-dir FOLDER`. A
row a trace: what kernels of each kind take, how long nothing but communication runs, how long
nothing at all.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer

from flux_megatron.lab.bench.table_run import append

Interval = tuple[float, float]

KINDS = {
    "collective": r"nccl",
    "wait": r"wait_sources|rank_barrier|announce",
    "attention": r"sdpa|flash|fmha|attention",
    "optimizer": r"multi_tensor|adam|l2norm|normtwo",  # the last looks for NaN in gradients
    "norm": r"norm",
    "tokens of experts": r"(send|return)_tokens|choices|place_rows|(return|collect)_gradients",
    "rows of experts": r"permute|sort_chunks|row_id",
    "linear": r"gemm|nvjet|xmma|cutlass|cublas",
    "sum of parts": r"reduce_received",
    "copy": r"^memcpy|^memset",
}  # the first that is found; "other" otherwise
COMMUNICATION = ("collective", "wait", "tokens of experts", "copy")


def activities(trace: Path) -> list[tuple[str, Interval]]:
    """What ran on the GPU in a trace that torch's profiler exported, and when, in us."""
    return [
        (event["name"], (event["ts"], event["ts"] + event["dur"]))
        for event in json.loads(trace.read_text())["traceEvents"]
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]


def kind_of(name: str) -> str:
    return next((kind for kind, words in KINDS.items() if re.search(words, name.lower())), "other")


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of the intervals: disjoint, in order."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def shares(recorded: list[tuple[str, Interval]]) -> dict[str, Any]:
    """Times of a step in us. Kinds that run at once both count in `by_kind_us`."""
    by_kind: dict[str, float] = defaultdict(float)
    for name, span in recorded:
        by_kind[kind_of(name)] += length([span])
    busy = union(span for _, span in recorded)
    computing = length(union(span for name, span in recorded if kind_of(name) not in COMMUNICATION))
    span_us = busy[-1][1] - busy[0][0]
    return {
        "span_us": round(span_us), "idle_us": round(span_us - length(busy)),
        "communication_alone_us": round(length(busy) - computing),
        "by_kind_us": {kind: round(us) for kind, us in sorted(by_kind.items())},
    }  # fmt: skip


def main(out: Path, traces: list[Path]) -> None:
    """Append a row a trace, and print it."""
    for trace in traces:
        found = activities(trace)
        if not found:
            raise typer.BadParameter(f"{trace} has nothing that ran on a GPU")
        row = {"what": "breakdown", "trace": trace.name, **shares(found)}
        append(out, [row])
        print(row, flush=True)


if __name__ == "__main__":
    typer.run(main)
