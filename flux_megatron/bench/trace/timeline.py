"""What happened when on a rank, read from the events of torch's profiler; and how much of the
communication was hidden. No torch.

On GPUs spans are what the device ran. On the CPU, where nothing runs beside the caller, they are
the phases of the calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

COMPUTE, COMMUNICATION, WAIT, PASS = LANES = ("compute", "communication", "wait", "pass")
CLOCK = "clock"  # the phase, on GPUs the kernel, that reads the device's clock first
PASSES = ("fprop", "dgrad", "wgrad")
_PHASES = {
    **dict.fromkeys(("gather push", "scatter push", "all-gather", "reduce-scatter"), COMMUNICATION),
    "wait": WAIT,
    **dict.fromkeys(
        ("local shard", "ag_gemm kernel", "gemm chunk", "gemm_rs kernel", "reduce", "wgrad"),
        COMPUTE,
    ),
}
_WAITING = ("wait_sources", "rank_barrier")
_ON_DEVICE = ("kernel", "gpu_memcpy")

Event = dict[str, Any]
Interval = tuple[float, float]


class Span(NamedTuple):
    """Times in microseconds from the end of the reading of the clock."""

    lane: str
    name: str
    begin_us: float
    end_us: float


class KernelWait(NamedTuple):
    """A wait inside a kernel: `cta` needed rows of `source` for `tile`."""

    cta: int
    tile: int
    source: int
    begin_us: float
    end_us: float

    @property
    def time_us(self) -> float:
        return self.end_us - self.begin_us


@dataclass(frozen=True)
class KernelWaits:
    """The waits of one launch; `lost` ones were not recorded."""

    kernel: str
    waits: list[KernelWait]
    lost: int

    @property
    def ctas(self) -> int:
        return len({wait.cta for wait in self.waits})

    @property
    def mean_us(self) -> float:
        """The mean total wait of the CTAs that wait, in microseconds."""
        return sum(wait.time_us for wait in self.waits) / max(1, self.ctas)


@dataclass(frozen=True)
class Timeline:
    """One rank's."""

    rank: int
    spans: list[Span]
    kernels: list[KernelWaits] = field(default_factory=list)

    def of(self, lane: str) -> list[Span]:
        return [span for span in self.spans if span.lane == lane]

    def intervals(self, lane: str) -> list[Interval]:
        """The times with an event in the lane: disjoint intervals, in order."""
        return union((span.begin_us, span.end_us) for span in self.of(lane))

    @property
    def time_us(self) -> float:
        busy = [span for span in self.spans if span.lane != PASS]
        return max(s.end_us for s in busy) - min(s.begin_us for s in busy) if busy else 0.0

    @property
    def communication_us(self) -> float:
        return length(self.intervals(COMMUNICATION))

    @property
    def hidden_us(self) -> float:
        """The time of communication during computation."""
        return length(overlap(self.intervals(COMMUNICATION), self.intervals(COMPUTE)))

    @property
    def hidden_share(self) -> float | None:
        """The hidden share of communication; None if only a GEMM kernel itself communicates."""
        return self.hidden_us / self.communication_us if self.communication_us else None

    def summary(self) -> dict[str, Any]:
        share = self.hidden_share
        return {
            "rank": self.rank,
            "time_us": round(self.time_us, 1),
            "compute_us": round(length(self.intervals(COMPUTE)), 1),
            "communication_us": round(self.communication_us, 1),
            "hidden_us": round(self.hidden_us, 1),
            "hidden_share": None if share is None else round(share, 4),
            "wait_kernels_us": round(length(self.intervals(WAIT)), 1),
            "waits_in_kernels": [_waits_summary(kernel) for kernel in self.kernels],
        }


def _waits_summary(kernel: KernelWaits, longest: int = 50) -> dict[str, Any]:
    by_source: dict[int, float] = {}
    for wait in kernel.waits:
        by_source[wait.source] = by_source.get(wait.source, 0.0) + wait.time_us
    tiles = sorted(kernel.waits, key=lambda wait: -wait.time_us)[:longest]
    return {
        "kernel": kernel.kernel,
        "waits": len(kernel.waits),
        "lost": kernel.lost,
        "ctas": kernel.ctas,
        "mean_us_of_a_program": round(kernel.mean_us, 2),
        "mean_us_by_source": {
            source: round(time_us / kernel.ctas, 2) for source, time_us in sorted(by_source.items())
        },
        "longest": [
            {"cta": w.cta, "tile": w.tile, "source": w.source, "us": round(w.time_us, 2)}
            for w in tiles
        ],
    }


def clock_event(events: Iterable[Event], prefix: str) -> Event:
    """The event that reads the device's clock: on GPUs the kernel, else the phase."""
    found = [e for e in events if e.get("ph") == "X" and _is_clock(e, prefix)]
    assert found, "the trace has no reading of the clock"
    return max(found, key=lambda event: event["cat"] == "kernel")


def _is_clock(event: Event, prefix: str) -> bool:
    return (event.get("cat"), event["name"]) in (
        ("kernel", "clock_kernel"),
        ("user_annotation", prefix + CLOCK),
    )


def read(events: Sequence[Event], prefix: str) -> list[Span]:
    """The spans after the clock, by their begin. Phases have names that begin with `prefix`."""
    clock = clock_event(events, prefix)
    start_us = clock["ts"] + clock["dur"]
    on_gpu = clock["cat"] == "kernel"
    stream = clock.get("args", {}).get("stream")
    spans = []
    for event in events:
        if event.get("ph") != "X" or event["ts"] < start_us:
            continue
        place = _on_gpu(event, prefix, stream) if on_gpu else _on_cpu(event, prefix)
        if place is not None:
            begin_us = event["ts"] - start_us
            spans.append(Span(*place, begin_us, begin_us + event["dur"]))
    return sorted(spans, key=lambda span: span.begin_us)


def _on_gpu(event: Event, prefix: str, compute_stream: Any) -> tuple[str, str] | None:
    name, category = event["name"], event.get("cat")
    if category == "gpu_user_annotation":
        return _pass(name, prefix)
    if category not in _ON_DEVICE:
        return None
    if "nccl" in name:
        return COMMUNICATION, name
    if category == "gpu_memcpy":  # in the stream of the GEMMs it copies the local shard
        same = event.get("args", {}).get("stream") == compute_stream
        return (COMPUTE if same else COMMUNICATION), name
    return (WAIT if name.startswith(_WAITING) else COMPUTE), name


def _on_cpu(event: Event, prefix: str) -> tuple[str, str] | None:
    if event.get("cat") != "user_annotation":
        return None
    name = event["name"].removeprefix(prefix)
    return (_PHASES[name], name) if name in _PHASES else _pass(event["name"], prefix)


def _pass(name: str, prefix: str) -> tuple[str, str] | None:
    name = name.removeprefix(prefix)
    return (PASS, name) if name in PASSES else None


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of the intervals: disjoint, in order."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def overlap(these: Iterable[Interval], those: Sequence[Interval]) -> list[Interval]:
    """The intersection of both; each is disjoint and in order."""
    return [
        (max(begin, other_begin), min(end, other_end))
        for begin, end in these
        for other_begin, other_end in those
        if begin < other_end and other_begin < end
    ]


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def waiting_over_time(kernel: KernelWaits) -> list[tuple[float, int]]:
    """(time, CTAs that wait from then on), in order."""
    changes = sorted(
        [(w.begin_us, 1) for w in kernel.waits] + [(w.end_us, -1) for w in kernel.waits]
    )
    steps, waiting = [], 0
    for (time_us, change), following in pairwise([*changes, (float("inf"), 0)]):
        waiting += change
        if following[0] > time_us:
            steps.append((time_us, waiting))
    return steps
