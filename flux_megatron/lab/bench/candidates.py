"""The participants of a case: a name, and a call or the reason why there is none. And what they
must give, the reference on the operands of all ranks in a wider dtype.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron import settings
from flux_megatron.dispatch import decide
from flux_megatron.lab import reference
from flux_megatron.lab.bench.records import IN_A_GRAPH
from flux_megatron.patterns import Pattern

Call = Callable[[], tuple[Any, ...]]  # tensors
# cycles, 10 ms near 2 GHz: calls whose host time is taken start no work meanwhile
BEHIND_SLEEP = 20_000_000
Results = TypeVar("Results")


@dataclass(frozen=True)
class Candidate:
    """`call` returns the results of the case; `reason` says why there is no call.

    A `local` candidate only multiplies: its result is this rank's GEMM, without communication.
    `plan` gives the plan of ours as JSON after a call.
    """

    name: str
    role: str
    call: Call | None
    reason: str = ""
    local: bool = False
    plan: Callable[[], str] | None = None


def with_strategy(strategy: str, function: Callable[..., Any], *args: Any, **options: Any) -> Call:
    """A call of `function` under FLUX_MEGATRON_STRATEGY=`strategy`, as a tuple of results."""

    def call() -> tuple[Any, ...]:
        if settings.get().strategy != strategy:
            os.environ["FLUX_MEGATRON_STRATEGY"] = strategy
            settings.reload()
        result = function(*args, **options)
        return result if isinstance(result, tuple) else (result,)

    return call


def plan_of_auto(
    pattern: Pattern, x: Tensor, w: Tensor, group: ProcessGroup, layout: str
) -> Callable[[], str]:
    """A function that gives the chosen plan of a call of x and w as JSON. It is collective."""
    chosen = with_strategy("auto", decide, pattern, x, w, None, group, layout, None)
    return lambda: chosen()[0].plan.dumps()


def in_graphs(candidates: Iterable[Candidate], device: torch.device) -> Iterator[Candidate]:
    """Each candidate that communicates once more, replayed from a CUDA graph."""
    for one in candidates:
        if one.local or one.call is None:
            continue
        call = replayed(one.call) if device.type == "cuda" else None
        reason = "" if call else "CUDA graphs need a GPU"
        yield replace(one, name=one.name + IN_A_GRAPH, call=call, reason=reason)


def replayed(call: Callable[[], Results]) -> Callable[[], Results]:
    """Replays of a graph of `call`, which is captured at the first one, behind an eager call.

    On the stream of that moment, unless that is the default one, which cannot be captured. Backward
    runs on forward's stream: where the call has one, forward must not be on the default stream.
    """

    @cache
    def captured() -> tuple[torch.cuda.CUDAGraph, Results]:
        call()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        own = None if stream == torch.cuda.default_stream() else stream
        # backward runs in threads of autograd
        with torch.cuda.graph(graph, stream=own, capture_error_mode="thread_local"):
            return graph, call()

    def replay() -> Results:
        graph, results = captured()
        graph.replay()
        return results

    return replay


def expected(pattern: Pattern, x: Tensor, w: Tensor, layout: str, group: ProcessGroup) -> Tensor:
    """This rank's y, from the x and w of all ranks. Collective."""
    compute, xs = reference.PATTERNS[pattern], _of_all(x, group)
    if pattern.spec.gathers:  # the w of others gives the y of others
        return compute(xs, [widened(w)], layout)[0]
    return compute(xs, _of_all(w, group), layout)[group.rank()]


def widened(tensor: Tensor) -> Tensor:
    """In fp64 for fp32, else in fp32: the reference rounds nothing of it."""
    wide = torch.float64 if tensor.dtype == torch.float32 else torch.float32
    return tensor.detach().to(wide)


def _of_all(mine: Tensor, group: ProcessGroup) -> list[Tensor]:
    shards = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(shards, mine.detach().contiguous(), group=group)
    return [widened(shard) for shard in shards]


def host_time_us(call: Callable[[], object], device: torch.device, n: int = 20) -> float:
    """The median time that the host spends in one call, in microseconds, on this rank.

    On CUDA the n calls are enqueued behind a sleeping device. Collective if the call is.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda._sleep(BEHIND_SLEEP)
    marks = [time.perf_counter()]
    for _ in range(n):
        call()
        marks.append(time.perf_counter())
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return statistics.median((b - a) * 1e6 for a, b in pairwise(marks))
