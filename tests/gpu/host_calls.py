"""What a call takes the host, by strategy: driver calls made by Python one at a time, and by C from
lists. Calls "both ways" are a layer's forward and backward, with torch's wgrad.

    torchrun --nproc-per-node=2 tests/gpu/host_calls.py host_calls.jsonl --commit COMMIT
    TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 FLUX_MEGATRON_TIMEOUT_S=60 \
        torchrun --nproc-per-node=2 tests/gpu/host_calls.py host_calls.jsonl --shared
    TRITON_INTERPRET=1 torchrun --nproc-per-node=2 tests/gpu/host_calls.py rows.jsonl --device cpu

With `--shared` both ranks have the first GPU, and gloo: times of the host count there, not of the
GPU, whose kernels wait for a process that does not run, and the plan of `hopper` whose tiles the
copy engine sends is left out. All calls are verified on small integers, every bit. A line a
strategy, what is called, and arm: the median host time of a call, of so many that no queue is full,
with nothing awaited between them. `torch.mm` and a loop of Python tell how fast the host is.
"""

from __future__ import annotations

import faulthandler
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

import gpu_run
import torch
import torch.distributed as dist
import typer
from gpu_run import Run
from torch import Tensor

import flux_megatron
from flux_megatron import ops, settings
from flux_megatron.bench import provenance
from flux_megatron.nn.functions import column_parallel_linear, row_parallel_linear
from flux_megatron.overlap import hopper
from flux_megatron.patterns import COLUMN, ROW
from flux_megatron.problem import Plan, Problem
from flux_megatron.symm import device as devices
from flux_megatron.symm import native_engine, workspace

STRATEGIES = ("hopper", "fused", "pipelined", "sequential")
SIZES = {"cuda": (1024, 2048, 1024), "cpu": (16, 32, 16)}  # M / R, N / R and K of AG+GEMM
BATCH, WARM = 40, 8  # calls that are enqueued without a wait; calls before any is timed
Call = Callable[[], Tensor]


def start(device: str, out: Path, commit: str, seconds: float, shared: bool) -> Run:
    if not shared:
        return gpu_run.start_on(device, out, commit, seconds)
    faulthandler.dump_traceback_later(seconds + gpu_run.GRACE_S, exit=True)
    on = torch.device("cuda", 0)
    torch.cuda.set_device(on)
    dist.init_process_group("gloo", timeout=timedelta(seconds=gpu_run.COLLECTIVE_LIMIT_S))
    group = dist.group.WORLD
    assert group is not None
    about = provenance.describe(on, group.size(), torch.bfloat16, 1, False, commit)
    return Run(group, on, about, out, time.monotonic() + seconds)


def whole(run: Run, seed: int, *size: int) -> Tensor:
    """Few whole numbers, the same on every rank: bf16 has every sum of their products."""
    made = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-8, 9, size, generator=made)
    kept = (drawn.sign() * (drawn.abs() == 8)).to(getattr(torch, run.about.dtype))
    return kept.to(run.device)


class Layer:
    """Operands of one rank and what the calls must give."""

    def __init__(self, run: Run, shared: bool = False) -> None:
        self.run, self.group, self.shared = run, run.group, shared
        R, rank = run.group.size(), run.group.rank()
        rows, N, K = SIZES[run.device.type]
        xs = [whole(run, 10 + r, rows, K) for r in range(R)]
        self.x, self.w = xs[rank], whole(run, 20 + rank, N, K)
        self.y = torch.cat(xs) @ self.w.t()
        parts = [(whole(run, 30 + r, R * rows, K), whole(run, 40 + r, N, K)) for r in range(R)]
        self.part, self.part_w = parts[rank]
        total = torch.stack([(x @ w.t()).float() for x, w in parts]).sum(0)
        self.sum = total.chunk(R)[rank].to(self.x.dtype)
        self.small = whole(run, 50, 64, 64)
        dys = [whole(run, 60 + r, R * rows, N) for r in range(R)]
        ws = [whole(run, 20 + r, N, K) for r in range(R)]
        both = [(dy @ w).float() for dy, w in zip(dys, ws, strict=True)]
        self.dy, self.dx = dys[rank], torch.stack(both).sum(0).chunk(R)[rank].to(self.x.dtype)
        part_dys = [whole(run, 70 + r, rows, N) for r in range(R)]
        self.part_dy, self.part_dx = part_dys[rank], torch.cat(part_dys) @ self.part_w

    def pushed(self) -> Plan | None:
        """The plan of `hopper` whose tiles the copy engine sends, where that can run."""
        rows, N, K = SIZES[self.run.device.type]
        R, kind = self.group.size(), self.run.device.type
        problem = Problem.of_operands(ROW, R * rows, N, K, self.run.about.dtype, R, "nt", kind)
        if hopper.supports(problem):
            return None
        return replace(hopper.default_plan(problem), transport="copy_engine", comm_rows=rows // 2)

    def calls(self, strategy: str) -> dict[str, tuple[Call, Tensor]]:
        """By name: a call, and its result."""
        x, w, group = self.x, self.w, self.group
        xp, wp = x.view(len(x), 1, -1).clone(), torch.nn.Parameter(w.clone())
        pp, pw = self.part.view(len(self.part), 1, -1).clone(), torch.nn.Parameter(self.part_w)
        tokens = (-1, 1, w.shape[0])
        calls: dict[str, tuple[Call, Tensor]] = {
            "ag_gemm": (lambda: ops.all_gather_gemm(x, w, group), self.y),
            "gemm_rs": (lambda: ops.gemm_reduce_scatter(self.part, self.part_w, group), self.sum),
            "column forward": (
                lambda: column_parallel_linear(xp.requires_grad_(), wp, None, group=group),
                self.y.view(tokens),
            ),
            "row forward": (
                lambda: row_parallel_linear(pp.requires_grad_(), pw, group=group),
                self.sum.view(tokens),
            ),
            "column, both ways": (
                lambda: _dx(calls["column forward"][0], xp, wp, self.dy.view(tokens)),
                self.dx.view_as(xp),
            ),
            "row, both ways": (
                lambda: _dx(calls["row forward"][0], pp, pw, self.part_dy.view(tokens)),
                self.part_dx.view_as(pp),
            ),
        }
        # A copy within one GPU needs SMs, all of which a kernel holds that waits for it.
        if strategy == "hopper" and not self.shared and (plan := self.pushed()):
            calls["gemm_rs, copy engine"] = (
                lambda: ops.gemm_reduce_scatter(self.part, self.part_w, group, plan=plan), self.sum
            )  # fmt: skip
        return calls

    def runs(self, strategy: str) -> bool:
        """Whether the strategy, from now on that of all calls, runs both operations here."""
        os.environ["FLUX_MEGATRON_STRATEGY"] = strategy
        settings.reload()
        kinds = ((COLUMN, self.x, self.w), (ROW, self.part, self.part_w))
        return all(
            ops.decide(pattern, x, w, None, self.group, "nt", None).plan.strategy == strategy
            for pattern, x, w in kinds
        )


def _dx(forward: Call, x: Tensor, w: Tensor, dy: Tensor) -> Tensor:
    return torch.autograd.grad(forward(), (x, w), dy)[0]


@contextmanager
def engine(run: Run, arm: str) -> Iterator[None]:
    """New workspaces whose copy engine Python drives, or C."""
    reason = {"python": "measured without", "native": native_engine.unavailable()}[arm]
    drained(run)
    workspace.release()
    devices.copy_engine.cache_clear()
    with (
        mock.patch.object(native_engine, "unavailable", return_value=reason),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        devices.copy_engine(run.device)
        yield
        drained(run)


def drained(run: Run) -> None:
    if run.device.type == "cuda":
        flux_megatron.synchronize()
        torch.cuda.synchronize()
    dist.barrier(group=run.group)


def host_us(run: Run, call: Call, batches: int) -> list[float]:
    """What each call took the host; the GPU is idle before a batch of them."""
    times = []
    for _ in range(batches):
        drained(run)
        for _ in range(BATCH):
            begin = time.perf_counter()
            call()
            times.append(1e6 * (time.perf_counter() - begin))
    drained(run)
    return times


def measure(run: Run, layer: Layer, arm: str, strategy: str, batches: int) -> bool:
    """Whether all calls of a strategy are exact; they are timed after that."""
    for name, (call, expected) in layer.calls(strategy).items():
        wrong = torch.zeros(1)
        for _ in range(WARM):
            wrong += (call() != expected).sum().cpu()
        times = host_us(run, call, batches)
        wrong += (call() != expected).sum().cpu()
        right = not run.slowest(wrong).item()
        row = run.row(
            "host_calls", strategy=strategy, call=name, arm=arm, exact=right, calls=len(times),
            median_us=round(statistics.median(times), 2),
            p10_us=round(statistics.quantiles(times, n=10)[0], 2),
            p90_us=round(statistics.quantiles(times, n=10)[-1], 2),
            refused=refusals(),
        )  # fmt: skip
        run.say(
            f"{strategy:11}{name:22}{arm:8}{row['median_us']:8.1f} us"
            f"{'' if right else '  WRONG'}  {'; '.join(row['refused'])}"
        )
        if not right:
            return False
    return True


def refusals() -> list[str]:
    """Why calls are not lists, as far as there is a reason but that kernels were new."""
    found = [
        one.refused
        for space in workspace.workspaces()
        for decision in space.decisions.values()
        for one in decision.steady
    ]
    return sorted({one for one in found if one and "not launched directly" not in one})


def host_speed(run: Run, layer: Layer, batches: int) -> None:
    """How fast this host is: what one library GEMM takes it, and a hundred turns of a loop."""
    out = layer.small @ layer.small
    calls: dict[str, Call] = {
        "torch.mm": lambda: torch.mm(layer.small, layer.small, out=out),
        "torch.mm, new": lambda: layer.small @ layer.small,
        "100 turns of Python": lambda: [n * n for n in range(100)] and out,
    }
    for name, call in calls.items():
        us = round(statistics.median(host_us(run, call, batches)), 2)
        run.row("host_calls", strategy="none", call=name, arm="host", median_us=us)
        run.say(f"{'':11}{name:22}{'host':8}{us:8.1f} us")


def main(
    out: Path, commit: str = "", device: str = "cuda", shared: bool = False,
    strategies: str = ",".join(STRATEGIES), batches: int = 5, rounds: int = 2,
    seconds: float = 150,
) -> None:  # fmt: skip
    """Be one of the ranks. Both arms in turn, `rounds` times, until `seconds` are over."""
    run = start(device, out, commit, seconds, shared)
    layer = Layer(run, shared)
    host_speed(run, layer, batches)
    if reason := native_engine.unavailable():
        run.say(f"C cannot make the driver calls here: {reason}")
    wanted = [name for name in strategies.split(",") if not shared or name != "sequential"]
    for _ in range(rounds):
        for arm in ("python", "native") if run.device.type == "cuda" else ("python",):
            with engine(run, arm):
                for name in wanted:
                    if not run.time_left() or not layer.runs(name):
                        continue
                    if not measure(run, layer, arm, name, batches):
                        gpu_run.finish(run, 1)
    gpu_run.finish(run)


if __name__ == "__main__":
    typer.run(main)
