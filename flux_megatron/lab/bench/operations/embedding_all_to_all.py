"""Embedding + All-to-All beside one library lookup over all tables of a rank and NCCL.

First every result of many back-to-back calls is compared, exactly, with the library's on small
integers, with one rank late. Then all candidates of a case are timed in turns, eager and replayed
from CUDA graphs.

| candidate | forward | backward |
| --- | --- | --- |
| lookup | `F.embedding_bag` over the concatenated tables | its gradient |
| library | the same, and `all_to_all_single` | the same behind `all_to_all_single` |
| fused | ours | ours |

The library is given its indices for concatenated tables, and the bag of each entry, for nothing.

A fault of the device is printed by its rank with case, candidate and stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace

import torch
from torch import Tensor

from flux_megatron.lab.bench.candidates import replayed
from flux_megatron.lab.bench.operations.embedding_work import CASES, CHECKED, SMALL, Case, Work
from flux_megatron.lab.bench.table_run import Run
from flux_megatron.symm.workspace import release
from flux_megatron.tuning.timing import race

EPOCHS = {"cuda": 20, "cpu": 3}
NAMES = ("lookup", "library", "fused")


def cases(run: Run) -> tuple[Case, ...]:
    return SMALL if run.device.type == "cpu" else CASES


def verify(run: Run) -> str:
    """What is wrong on this rank, or "", the same on all ranks if it is "". Collective."""
    for case in SMALL if run.device.type == "cpu" else CHECKED:
        said = wrong(case, run, EPOCHS[run.device.type])
        if run.slowest(torch.tensor(float(bool(said)))):
            return said or "wrong on another rank"
        run.say(f"{case}: exact")
    return ""


def wrong(case: Case, run: Run, epochs: int) -> str:
    """The first result that is not the library's, or nothing. On GPUs half of the calls are
    replays.
    """
    work, seen = Work(case, run), []
    graphs = run.device.type == "cuda"
    calls: tuple[Callable, ...] = (work.fused, work.fused_backward)
    for epoch in range(epochs):
        if graphs and epoch == epochs // 2:
            calls = tuple(captured(call, run, f"{case} {call.__name__}") for call in calls)
        work.fill()
        if run.device.type == "cuda" and epoch % run.group.size() == run.group.rank():
            torch.cuda._sleep(2_000_000)
        got = [call() for call in calls]
        seen.append([(one != right).sum() for one, right in
                     zip(got, (work.library(), work.library_backward()), strict=True)])  # fmt: skip
    for epoch, counts in enumerate(seen):
        if any(int(count) for count in counts):
            return f"{case}, epoch {epoch}: {[int(count) for count in counts]} elements are wrong"
    return ""


@contextmanager
def stage(run: Run, title: str) -> Iterator[None]:
    """Ends when the device has done it. A failure is printed here: after a fault of the device no
    collective could report it.
    """
    try:
        yield
        if run.device.type == "cuda":
            torch.cuda.synchronize(run.device)
    except Exception as error:
        print(f"rank {run.group.rank()}: {title}: {type(error).__name__}: {error}", flush=True)
        raise


def captured(call: Callable[[], Tensor], run: Run, title: str) -> Callable[[], Tensor]:
    """Replays of a graph of the call."""
    with stage(run, f"{title}, eager"):
        call()
    replay = replayed(call)
    with stage(run, f"{title}, captured and replayed"):
        replay()
    return replay


def candidates(work: Work, direction: str) -> dict[str, Callable[[], Tensor]]:
    """All of them eager, then on GPUs as graphs."""
    suffix = "" if direction == "forward" else "_backward"
    calls: dict[str, Callable[[], Tensor]] = {name: getattr(work, name + suffix) for name in NAMES}
    made: dict[str, Callable[[], Tensor]] = {}
    for name, call in calls.items() if work.run.device.type == "cuda" else ():
        title = f"{work.case} {direction} {name}"

        def capture(name: str = name, call: Callable = call, title: str = title) -> None:
            made[f"{name} in a graph"] = captured(call, work.run, title)

        if failure := work.run.failure(capture):
            work.run.say(f"{title} cannot be captured: {failure}")
            made.pop(f"{name} in a graph", None)
    return calls | made


def measure(run: Run, case: Case, rounds: int) -> None:
    """Rows of both directions."""
    with stage(run, f"{case} operands"):
        work = Work(case, run)
        work.fill()
    about = replace(run.about, dtype=str(case.dtype).removeprefix("torch."))
    rows = replace(run, about=about)  # what it says of the run comes last in a row
    for direction in ("forward", "backward"):
        calls = candidates(work, direction)
        found = race(calls, group=run.group, device=run.device, rounds=rounds, warmup=2)
        baselines = [name for name in found.times_us if name.startswith("library")]
        texts = []
        for name in found.times_us:
            median_us, speedup = found.median_us(name), None
            if baselines:  # the last one: in a graph, if there are any
                speedup = round(found.median_us(baselines[-1]) / median_us, 3)
            texts.append(f"{name} {median_us:.0f} us" + f" ({speedup}x)" * bool(baselines))
            rows.row(
                "embedding_a2a", direction=direction, candidate=name,
                **asdict(case), median_us=round(median_us, 1),
                times_us=[round(t, 1) for t in found.times_us[name]],
                speedup_over_library=speedup,
            )  # fmt: skip
        run.say(f"{case} {direction}: " + ", ".join(texts))
        for name, failure in found.failures.items():
            run.say(f"{case} {direction} {name}: {failure}")
    del work, calls
    release()  # symmetric memory of the next size
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
