"""One rank of a traced run: `python -m flux_megatron.bench.trace.worker OPTIONS`, by `launch` or
torchrun. OPTIONS is `TraceOptions` as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.profiler import ProfilerActivity, profile, schedule

from flux_megatron import settings
from flux_megatron.bench.rank_processes import as_rank
from flux_megatron.bench.trace import merge, picture, timeline
from flux_megatron.bench.trace.merge import RankTrace
from flux_megatron.bench.trace.options import TraceOptions
from flux_megatron.bench.trace.timeline import KernelWait, KernelWaits, Timeline
from flux_megatron.bench.worker import joined
from flux_megatron.kernels import wait_records
from flux_megatron.nn.functions import column_parallel_linear, row_parallel_linear
from flux_megatron.overlap import wait_log
from flux_megatron.overlap.phase import PREFIX, phase
from flux_megatron.symm import workspace
from flux_megatron.tuning.timing import AFTER_ALIGNMENT, BEHIND_SLEEP
from flux_megatron.wgrad import accumulate_wgrad_by_torch

WARMUP = 3  # steps; and as many while the profiler is warming up


class Layer:
    """Operands of one layer on this rank; `step` is its forward and its backward."""

    def __init__(self, options: TraceOptions, group: ProcessGroup, device: torch.device) -> None:
        R = group.size()
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        M, N, K = options.M, options.N, options.K
        self._group, self._column = group, options.layer == "column"

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=dtype, device=device) * 0.1

        if self._column:
            self._x, self._w, self._dy = random(M // R, K), random(N // R, K), random(M, N // R)
        else:
            self._x, self._w, self._dy = random(M, K // R), random(N, K // R), random(M // R, N)
        self._x.requires_grad_()
        self._w.requires_grad_()
        self._main_grad = torch.zeros(self._w.shape, dtype=torch.float32, device=device)

    def step(self) -> None:
        if self._column:
            y = column_parallel_linear(self._x, self._w, None, group=self._group, wgrad=self._wgrad)
        else:
            y = row_parallel_linear(self._x, self._w, group=self._group, wgrad=self._wgrad)
        torch.autograd.grad(y, (self._x, self._w), self._dy, allow_unused=True)

    def _wgrad(self, w: Tensor, dy: Tensor, x: Tensor) -> None:
        accumulate_wgrad_by_torch(self._main_grad, dy, x)


def main(options: TraceOptions) -> None:
    """Trace as rank RANK of WORLD_SIZE (torchrun's variables)."""
    os.environ["FLUX_MEGATRON_STRATEGY"] = options.strategy
    if options.waits:
        os.environ["FLUX_MEGATRON_RECORD_WAITS"] = "1"
    settings.reload()
    with joined(options) as (group, device):
        if group.rank() == 0:
            print(f"{2 * WARMUP} steps to warm up, one to record", file=sys.stderr, flush=True)
        trace = _traced(Layer(options, group, device), group, device)
        traces: list[RankTrace] = [trace] * group.size()
        dist.all_gather_object(traces, trace, group=group)
        if group.rank() == 0:
            _write(options, traces)


def _traced(layer: Layer, group: ProcessGroup, device: torch.device) -> RankTrace:
    for _ in range(WARMUP):
        layer.step()
    workspace.check()
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    timing = schedule(wait=0, warmup=WARMUP, active=1, repeat=1)
    with profile(activities=activities, schedule=timing) as profiler:
        for _ in range(WARMUP + 1):
            _align(group, device)
            wait_log.clear(device)
            with phase(timeline.CLOCK):
                now = wait_records.read_clock(device)
            layer.step()
            if on_gpu:
                torch.cuda.synchronize(device)
            profiler.step()
    workspace.check()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        recorded = json.loads(Path(file.name).read_text())
    events = recorded["traceEvents"]
    clock = timeline.clock_event(events, PREFIX)
    kernels = _kernel_waits(device, int(now)) if settings.get().record_waits else []
    return RankTrace(
        Timeline(group.rank(), timeline.read(events, PREFIX), kernels),
        events,
        recorded.get("baseTimeNanoseconds", 0),
        clock["ts"] + clock["dur"],
    )


def _align(group: ProcessGroup, device: torch.device) -> None:
    """Begin on all ranks together; on GPUs when the host has enqueued the step."""
    if device.type == "cpu":
        dist.barrier(group=group)
        return
    torch.cuda.synchronize(device)
    torch.cuda._sleep(BEHIND_SLEEP)
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    torch.cuda._sleep(AFTER_ALIGNMENT)


def _kernel_waits(device: torch.device, clock_ns: int) -> list[KernelWaits]:
    """The waits that kernels have recorded, in microseconds after the read of the clock."""

    def since(time_ns: int) -> float:
        return (time_ns - clock_ns) / 1e3

    return [
        KernelWaits(
            launch.kernel,
            [
                KernelWait(w.cta, w.tile, w.source, since(w.begin_ns), since(w.end_ns))
                for w in launch.waits
            ],
            launch.lost,
        )
        for launch in wait_log.recorded(device)
    ]


def _write(options: TraceOptions, traces: list[RankTrace]) -> None:
    from rich.console import Console

    from flux_megatron.bench.trace.display import table

    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    timelines = [trace.timeline for trace in traces]
    title = (
        f"{options.layer} layer, M {options.M}, N {options.N}, K {options.K}, TP {options.tp}, "
        f"strategy {options.strategy}, {_gpu()}: forward and backward"
    )
    merge.write(traces, out / "trace.json")
    picture.draw(timelines, title, out / "timeline.png")
    summary = {"options": json.loads(options.dumps()), "ranks": [t.summary() for t in timelines]}
    summary["options"].pop("out")
    (out / "summary.json").write_text(json.dumps(summary, indent=1))
    console = Console()
    console.print(table(timelines, title))
    console.print(f"{out}: trace.json (for https://ui.perfetto.dev), timeline.png, summary.json")


def _gpu() -> str:
    gpus = torch.cuda.is_available()
    return torch.cuda.get_device_name() if gpus else "CPU, kernels interpreted"


if __name__ == "__main__":
    as_rank(main, TraceOptions.loads(sys.argv[1]), "trace")
