"""One rank of `flux-megatron trace`: it writes the trace of torch's profiler, and rank 0 prints how
much of the communication was hidden.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.distributed import ProcessGroup
from torch.profiler import ProfilerActivity, profile, schedule

from flux_megatron import settings
from flux_megatron.lab.bench.backward import Backward
from flux_megatron.lab.bench.candidates import BEHIND_SLEEP
from flux_megatron.lab.bench.options import TraceOptions
from flux_megatron.lab.bench.suites import Case
from flux_megatron.lab.bench.table_run import Run
from flux_megatron.overlap.phase import PREFIX
from flux_megatron.symm import objects, workspace
from flux_megatron.tuning.timing import AFTER_ALIGNMENT

WARMUP = 3  # steps; and as many while the profiler is warming up
COMPUTE, COMMUNICATION, WAIT = "compute", "communication", "wait"
# phases of `overlap.phase`, for the CPU, where no device runs beside the host
_MOVES = ("gather push", "scatter push", "all-gather", "reduce-scatter")
_COMPUTES = ("local shard", "ag_gemm kernel", "gemm chunk", "gemm_rs kernel", "reduce", "wgrad")
_PHASES = dict.fromkeys(_MOVES, COMMUNICATION) | dict.fromkeys(_COMPUTES, COMPUTE) | {"wait": WAIT}
_WAITING = ("wait_sources", "rank_barrier")  # kernels that do nothing else
Interval = tuple[float, float]


class Summary(NamedTuple):
    """Microseconds of one rank: from the first to the last thing that ran; in which something
    computed; in which something travelled, and of those the ones beside a computation.
    """

    time: float
    compute: float
    communication: float
    hidden: float


def step_of(
    options: TraceOptions, group: ProcessGroup, device: torch.device
) -> Callable[[], object]:
    op = "fc1" if options.layer == "column" else "fc2"
    sizes = options.M, options.N, options.K
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layer = Backward(Case("trace", "backward", op, *sizes, "nn", options.tp), group, device, dtype)
    operands = layer.x, layer.w

    def step() -> object:
        return torch.autograd.grad(layer.forward(), operands, layer.dy, allow_unused=True)

    return step


def measure_all(options: TraceOptions, run: Run) -> None:
    os.environ["FLUX_MEGATRON_STRATEGY"] = options.strategy
    settings.reload()
    if run.first:
        print(f"{2 * WARMUP} steps to warm up, one to record", file=sys.stderr, flush=True)
    step = step_of(options, run.group, run.device)
    profiler = _traced(step, run.group, run.device)
    profiler.export_chrome_trace(f"{options.out}/trace_rank-{run.group.rank()}.json")
    summaries = objects.all_gather(summarize(profiler.events()), run.group)
    if run.first:
        _print(options, summaries)


def _traced(step: Callable[[], object], group: ProcessGroup, device: torch.device) -> profile:
    for _ in range(WARMUP):
        step()
    workspace.check()
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    timing = schedule(wait=0, warmup=WARMUP, active=1, repeat=1)
    with profile(activities=activities, schedule=timing) as profiler:
        for _ in range(WARMUP + 1):
            if on_gpu:  # begin together, when the host has enqueued the step
                torch.cuda.synchronize(device)
                torch.cuda._sleep(BEHIND_SLEEP)
                dist.all_reduce(torch.zeros(1, device=device), group=group)
                torch.cuda._sleep(AFTER_ALIGNMENT)
            else:
                dist.barrier(group=group)
            step()
            if on_gpu:
                torch.cuda.synchronize(device)
            profiler.step()
    workspace.check()
    return profiler


def summarize(events: Iterable[Any]) -> Summary:
    """From the events of torch's profiler: on GPUs what the device ran, on the CPU the phases."""
    events = [*events]
    on_device = [e for e in events if e.device_type == DeviceType.CUDA]
    phases = [e for e in events if e.name.startswith(PREFIX)]
    kinds = [(_of_device(e), e) for e in on_device]
    kinds = kinds or [(_PHASES.get(e.name.removeprefix(PREFIX)), e) for e in phases]
    spans: dict[str | None, list[Interval]] = {COMPUTE: [], COMMUNICATION: [], WAIT: []}
    for kind, event in kinds:
        spans.setdefault(kind, []).append((event.time_range.start, event.time_range.end))
    compute, moved = union(spans[COMPUTE]), union(spans[COMMUNICATION])
    busy = [*compute, *moved, *spans[WAIT]]
    time = max(end for _, end in busy) - min(begin for begin, _ in busy) if busy else 0.0
    hidden = length(compute) + length(moved) - length(union([*compute, *moved]))
    return Summary(time, length(compute), length(moved), hidden)


def _of_device(event: Any) -> str | None:
    """A kernel by its name; a push of the copy engine is a copy between GPUs."""
    name = event.name
    if name.startswith(PREFIX) or "spin_kernel" in name or "AllReduce" in name:  # of alignment
        return None
    if "nccl" in name or "PtoP" in name:
        return COMMUNICATION
    return WAIT if name.startswith(_WAITING) else COMPUTE


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


def _print(options: TraceOptions, summaries: Sequence[Summary]) -> None:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, interpreted"
    sizes = f"M {options.M}, N {options.N}, K {options.K}, TP {options.tp}"
    print(f"{options.layer} layer, {sizes}, {options.strategy}, {gpu}: microseconds")
    for rank, of in enumerate(summaries):
        share = f"{of.hidden / of.communication:.0%}" if of.communication else "-"
        print(
            f"rank {rank}: time {of.time:.1f}, compute {of.compute:.1f}, "
            f"communication {of.communication:.1f}, hidden {share}"
        )
    print(f"{options.out}: trace_rank-*.json, for https://ui.perfetto.dev")
