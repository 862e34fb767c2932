"""The traces of all ranks as one file for Perfetto or chrome://tracing: one process a rank, and one
more for the waits inside its kernels.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flux_megatron.bench.trace.timeline import Event, KernelWaits, Timeline

_SHORTEST_US = 1.0  # of a wait that is written
_WAITS = 1000  # added to a rank: the process of its waits


@dataclass(frozen=True)
class RankTrace:
    """Events of one rank with times from `base_ns` on, and where its timeline begins among them."""

    timeline: Timeline
    events: list[Event]
    base_ns: int
    start_us: float


def write(traces: Iterable[RankTrace], file: Path) -> None:
    """One file of all ranks, on the clock of the host."""
    traces = [*traces]
    origin_ns = min(trace.base_ns for trace in traces)
    events: list[Event] = []
    for trace in traces:
        rank, later_us = trace.timeline.rank, (trace.base_ns - origin_ns) / 1e3
        events.append(_named(rank, f"rank {rank}"))
        events += [_moved(event, rank, later_us) for event in trace.events if _is_kept(event)]
        if trace.timeline.kernels:
            events.append(_named(_WAITS + rank, f"rank {rank}: waits inside kernels"))
        for kernel in trace.timeline.kernels:
            events += _waits(kernel, _WAITS + rank, trace.start_us + later_us)
    file.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))


def _is_kept(event: Event) -> bool:
    """All but the names of processes and what belongs to none of this rank's threads."""
    metadata = event.get("ph") == "M" and event["name"] != "thread_name"
    return not metadata and "pid" in event and event.get("cat") != "Trace"


def _moved(event: Event, rank: int, later_us: float) -> Event:
    moved = {**event, "pid": rank, "ts": event.get("ts", 0) + later_us}
    if "id" in event:  # of an arrow from a launch to its kernel
        moved["id"] = f"{rank}.{event['id']}"
    return moved


def _named(process: int, name: str) -> Event:
    return {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}


def _waits(kernel: KernelWaits, process: int, start_us: float) -> list[dict[str, Any]]:
    return [
        {
            "ph": "X",
            "cat": "wait",
            "name": f"{kernel.kernel}: tile {wait.tile} waits for rank {wait.source}",
            "pid": process,
            "tid": wait.cta,
            "ts": start_us + wait.begin_us,
            "dur": wait.time_us,
        }
        for wait in kernel.waits
        if wait.time_us >= _SHORTEST_US
    ]
