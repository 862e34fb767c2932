"""Operations that are no linear layer of a training run, each beside its unfused baseline:
`flux-megatron bench operations`.

A module a name of `options.OPERATIONS`, with `CASES`, `SMALL` ones for the CPU, and a collective
`measure(run, case, rounds)`, which verifies the case, then writes rows of a table of its own. Right
first: what is timed gives every bit of what its baseline gives, on small integers.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from flux_megatron.lab.bench.candidates import replayed
from flux_megatron.lab.bench.options import OperationOptions
from flux_megatron.lab.bench.table_run import Run
from flux_megatron.symm.step_end import synchronize
from flux_megatron.symm.workspaces import release
from flux_megatron.tuning.timing import race

GRACE_S = 15
CALLS = {"cuda": 12, "cpu": 3}  # that are compared, each with operands of its own
LATE = 2_000_000  # cycles, about a millisecond
IN_A_GRAPH = " in a graph"
Call = Callable[[], Any]


def measure_all(options: OperationOptions, run: Run) -> None:
    """Measure the cases. `ArithmeticError`, on every rank, for a wrong result."""
    if options.time_limit_s is not None:
        faulthandler.dump_traceback_later(options.time_limit_s + GRACE_S, exit=True)
    for name in options.names:
        module = import_module(f"{__name__}.{name}")
        for case in module.SMALL if run.device.type == "cpu" else module.CASES:
            if run.time_left():
                try:
                    module.measure(run, case, options.rounds)
                except ArithmeticError as error:
                    raise ArithmeticError(f"{name}, {case}: {error}") from None
                release(graphs_dropped=True)  # symmetric memory of the next size
                if run.device.type == "cuda":
                    torch.cuda.empty_cache()


def generator(run: Run) -> torch.Generator:
    """Every rank draws its own numbers."""
    return torch.Generator(run.device).manual_seed(1 + run.group.rank())


@torch.no_grad()
def fill(made: torch.Generator, *tensors: Tensor) -> None:
    """Mostly zeros, else -1 or 1: bf16 has every sum, and FP8 every number."""
    for tensor in tensors:
        size, device = tensor.shape, tensor.device
        drawn = torch.randint(-8, 9, size, generator=made, device=device, dtype=torch.int8)
        tensor.copy_((drawn.sign() * (drawn.abs() == 8)).to(torch.half))


def and_in_graphs(run: Run, calls: Mapping[str, Call]) -> dict[str, Call]:
    """The calls, and on GPUs each once more as a replay of a CUDA graph."""
    on_gpu = run.device.type == "cuda"
    graphs = {name + IN_A_GRAPH: replayed(call) for name, call in calls.items() if on_gpu}
    return {**calls, **graphs}


@contextmanager
def captured_stream(run: Run) -> Iterator[None]:
    """All calls are made on the stream that is captured: where a gradient of x or w is summed
    autograd keeps the stream of the call that it saw first, and waits for the default one break a
    capture.
    """
    stream = torch.cuda.Stream(run.device) if run.device.type == "cuda" else None
    with torch.cuda.stream(stream):
        yield
    if stream is not None:
        torch.cuda.synchronize(run.device)


def race_row(
    run: Run, table: str, rounds: int, calls: Mapping[str, Call], title: str, **columns: object
) -> bool:
    """A row of all candidates, and a line; whether there was time for them. Collective."""
    if not run.time_left():
        run.say("no time for the others")
        return False
    found = race(calls, group=run.group, device=run.device, rounds=rounds)
    run.row(table, **columns, times_us=found.times_us, failures=found.failures)
    ms = {name: round(found.median_us(name) / 1e3, 3) for name in found.times_us}
    run.say(f"{title}, ms: {ms}, failed: {found.failures or 'none'}")
    return True


def _compare(call: Call, right: dict[str, Tensor]) -> None:
    found = _results(call())
    synchronize()  # a wait that ran out of time is its error
    for name, its in right.items():
        made = found[name]
        if wrong := int((made[: len(its)] != its).sum()):
            raise ArithmeticError(f"{wrong} of {its.numel()} elements of {name} are wrong")


def _results(made: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
    return {"y": made} if isinstance(made, Tensor) else made


def verify(run: Run, renew: Call, ours: Mapping[str, Call], baseline: Call) -> None:
    """`ArithmeticError`, on every rank, unless each of `ours` gives what `baseline` gives: one
    result, or several by name; where ours has more rows the first ones count. `renew` draws the
    operands of the next calls. On GPUs one rank after the other is late. Collective.
    """
    for number in range(CALLS[run.device.type]):
        renew()
        right = _results(baseline())
        for name, call in ours.items():
            if run.device.type == "cuda" and number % run.group.size() == run.group.rank():
                torch.cuda._sleep(LATE)
            if said := run.failure(partial(_compare, call, right)):
                raise ArithmeticError(f"{name}, call {number}: {said}")
