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
from pathlib import Path
from typing import Any

import typer

from flux_megatron.lab.bench.table_run import append
from flux_megatron.lab.bench.trace import Interval, length, union

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
NAMES = 25


def activities(trace: Path) -> list[tuple[str, Interval]]:
    """What ran on the GPU in a trace that torch's profiler exported, and when, in us; in the order
    of their beginnings.
    """
    found = [
        (event["name"], (event["ts"], event["ts"] + event["dur"]))
        for event in json.loads(trace.read_text())["traceEvents"]
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    return sorted(found, key=lambda one: one[1])


def kind_of(name: str) -> str:
    return next((kind for kind, words in KINDS.items() if re.search(words, name.lower())), "other")


def shares(recorded: list[tuple[str, Interval]]) -> dict[str, Any]:
    """Times of a step in us. Kinds that run at once both count in `by_kind_us`; `in_turn_us` has
    each product and each collective as it came.
    """
    by_kind: dict[str, float] = defaultdict(float)
    by_name: dict[str, float] = defaultdict(float)
    in_turn = []
    for name, span in recorded:
        us, kind = length([span]), kind_of(name)
        by_kind[kind], by_name[name[:90]] = by_kind[kind] + us, by_name[name[:90]] + us
        in_turn += [(name[:40], round(us))] if kind in ("linear", "collective") else []
    longest = sorted(by_name, key=by_name.__getitem__, reverse=True)[:NAMES]
    busy = union(span for _, span in recorded)
    computing = length(union(span for name, span in recorded if kind_of(name) not in COMMUNICATION))
    span_us = busy[-1][1] - busy[0][0]
    return {
        "span_us": round(span_us), "idle_us": round(span_us - length(busy)),
        "communication_alone_us": round(length(busy) - computing),
        "by_kind_us": {kind: round(us) for kind, us in sorted(by_kind.items())},
        "longest_us": {name: round(by_name[name]) for name in longest}, "in_turn_us": in_turn,
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
