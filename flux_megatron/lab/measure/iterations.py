"""Whole training iterations of Megatron-LM's unedited pretrain_gpt.py: stock, ours, userbuffers.

    python -m flux_megatron.lab.measure.iterations path/to/Megatron-LM iterations.jsonl --tp 4
    python -m flux_megatron.lab.measure.iterations path/to/Megatron-LM iterations.jsonl --tp 2 \
        --layout dp
    python -m flux_megatron.lab.measure.iterations path/to/Megatron-LM iterations.jsonl --tp 2 \
        --layout dp \
        --arms flux --timed 990                                           # does it hang?

The models of `configs/experiments/node` at several M, by default those without experts,
`--micro-batches` of them a step, by default one: the optimizer's share is largest then. `--layers`
makes them fit less memory. `--layout` says what tensor parallelism is beside: nothing, two replicas
whose gradients and parameters travel meanwhile (ep: nothing meanwhile), or two stages of an
interleaved pipeline. Experts are spread over all of them. `--apart memory` or `sockets` makes each
rank a machine, `sockets:2` each two (`gpu_run.be_apart`). With `--skew` that share of all tokens
has the first expert among its own. For each model and M two processes a rank run (`--arms`), one
after the other on the same GPUs:
- compare, `--flux-compare`: stock iterations, ours, and stock ones without tensor-parallel
  collectives in turn, blocks of `--block`. The first turn and the first iteration of every block
  warm up; times of the others are compared turn by turn, `--pairs` of them. E is the share of what
  the third arm gains that ours gains.
- te, `--tp-comm-overlap`: TransformerEngine's layers and userbuffers, `--timed` iterations after
  `WARM_UP`.
- stock, flux: stock or ours alone, as many.
- experts: Megatron's experts, whose all-to-all hides behind another micro-batch, as many.
- deepep: Megatron's experts with DeepEP as their dispatcher, as many.
- graphs: layers are captured in CUDA graphs, where the host takes no time. One process cannot
  switch between arms then: stock_graphs (of TransformerEngine's layers) and flux_graphs take turns,
  twice. Of layers with experts stock, and deepep_graphs, capture what comes before the dispatch,
  ours all.

All run with TransformerEngine's attention and optimizer where it is installed, and with our kernel
for fused weight gradients where apex is not. A process imports Megatron while the one before it
measures, and touches no GPU until that has ended: it saves ten seconds a process.

Prints a line a row, and appends the rows to the file. Measure plans before: `flux-megatron tune`.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from flux_megatron.lab.bench.table_run import append
from flux_megatron.lab.measure import gpu_run
from flux_megatron.lab.measure.megatron_jobs import (
    ARMS,
    BLOCK,
    CONNECTIONS,
    EXPERIMENTS,
    PAIRS,
    TIMED,
    TURN,
    WARM_UP,
    Job,
    Length,
    Process,
    jobs,
    rank,
)
from flux_megatron.lab.measure.skewed_router import SKEW
from flux_megatron.lab.results.iterations import Iteration, ResultsError

RANK = __file__
DENSE = "gpt3,llama2,qwen3-14b"
LEAST = 0.02  # of stock's time: what its collectives take less of says nothing of hiding them
SHOWN = ("model", "tp", "dp", "pp", "M", "micro_batches", "arm")


def compared(
    times: dict[int, float], length: Length, copies_ms: float
) -> tuple[dict[str, list[float]], dict]:
    """Times of each arm, and columns of our row: low, middle and high speedup, in words, and E.
    `copies_ms` of the arm without collectives are none that it would need.
    """
    from flux_megatron.integration.comparison import WARM_UP as COLD
    from flux_megatron.integration.comparison import speedup

    blocks = [
        [times[1 + length.block * index + at] for at in range(COLD, length.block)]
        for index in range(len(TURN), len(TURN) * (length.pairs + 1))
    ]
    by_arm = {name: blocks[place :: len(TURN)] for place, name in enumerate(TURN)}
    found = speedup(list(zip(by_arm["stock"], by_arm["flux"], strict=True)))
    low, high = found.interval or (found.ratio, found.ratio)
    ratio = [round(value, 4) for value in (low, found.ratio, high)]
    arms = {name: [*chain(*blocks)] for name, blocks in by_arm.items()}
    stock, flux, best = (statistics.median(arms[name]) for name in TURN)
    hidden = stock - (best - copies_ms)  # at most
    E = round((stock - flux) / hidden, 3) if hidden > LEAST * stock else None
    columns = {"speedup_low_middle_high": ratio, "speedup": str(found), "E": E}
    return arms, columns | {"copies_ms": copies_ms}


def rows(
    job: Job, found: Sequence[Iteration], machine: dict, copies_ms: float = 0
) -> Iterator[dict]:
    """Of a process with one arm, with the losses of all its iterations too."""
    times = {one.number: round(1e3 * one.seconds, 2) for one in found}
    arms = {job.name: [ms for number, ms in times.items() if number > WARM_UP]}
    columns: dict[str, object] = {}
    losses = {"losses": [one.loss and round(one.loss, 4) for one in found]}
    if job.name == "compare":
        losses = {}
        arms, columns = compared(times, job.length, copies_ms)
    model, words = job.workload.model, job.words
    last = len(words) - words[::-1].index("--transformer-impl")  # which counts
    for arm, milliseconds in arms.items():
        yield {
            "what": "iteration", "arm": arm, "model": model.name, "layers": model.layers,
            "M": job.M, **asdict(job.workload.parallel),
            "micro_batches": job.workload.micro_batches, "transformer_impl": words[last],
            "seq_length": model.seq_length, "dtype": job.workload.training.dtype,
            "median_ms": round(statistics.median(milliseconds), 2), "times_ms": milliseconds,
            **(columns if arm == "flux" else {}), **losses, **machine,
        }  # fmt: skip


def machine_of(checkout: Path, commit: str) -> dict:
    import torch

    from flux_megatron import settings
    from flux_megatron.tuning import environment

    try:
        from transformer_engine import __version__ as te
    except ImportError:
        te = None
    known = asdict(environment.of(torch.device("cuda", 0)))
    known["experts_once"] = settings.get().experts_once
    known["max_connections"] = os.environ.get(CONNECTIONS, "1")
    return {
        **known, "nccl": ".".join(map(str, torch.cuda.nccl.version())), "transformer_engine": te,
        "megatron_lm": checkout.name, "nvls": os.environ.get("NCCL_NVLS_ENABLE", "default"),
        "commit": commit, "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def main(
    checkout: Path, out: Path, tp: int = 4, commit: str = "unknown",
    M: Annotated[str, typer.Option("--M")] = "8192,4096,2048", more: str = "",
    seconds: float = 3600, arms: str = ",".join(ARMS), layout: str = "tp",
    micro_batches: int = 1, models: str = DENSE, block: int = BLOCK, pairs: int = PAIRS,
    timed: int = TIMED, limit_s: float = 150, layers: int = 0, apart: str = "",
    skew: Annotated[float, typer.Option(min=0, max=1)] = 0,
) -> None:  # fmt: skip
    """Measure those with one of `models` in their names at every M, as long as `seconds` allow to
    begin another process; one that takes longer than `limit_s` is stopped. Exits 1 if one failed
    or there was none.
    """
    machine, end = machine_of(checkout, commit), time.monotonic() + seconds
    if apart:
        os.environ[gpu_run.APART] = apart
        machine["link"] = gpu_run.link_of(apart)
    if skew:
        os.environ[SKEW] = str(skew)
        machine["skew"] = skew
    length = Length(block, pairs, timed)
    wanted = [
        job for rows in map(int, M.split(",")) for experiment in EXPERIMENTS
        if any(model in experiment for model in models.split(","))
        for job in jobs(experiment, rows, tp, more.split(), micro_batches, arms.split(","),
                        layout, length, layers)
    ]  # fmt: skip
    good = bool(wanted)
    with tempfile.TemporaryDirectory() as folder:
        processes = _one_ahead(wanted, checkout, Path(folder))
        for process in processes:
            try:
                done = process.iterations(limit_s)
                found = list(rows(process.job, done, machine, process.copies_ms()))
            except ResultsError as error:
                print(error, file=sys.stderr, flush=True)
                good = False
                continue
            append(out, found)
            for row in found:
                named = " ".join(f"{name} {row[name]}" for name in SHOWN)
                E = f"E {row['E']}" if "E" in row else ""
                print(f"{named} {row['median_ms']:.2f} ms", row.get("speedup", ""), E, flush=True)
            if time.monotonic() > end:
                print("no time for the others")
                processes.close()
    if not good:
        raise typer.Exit(1)


def _one_ahead(wanted: Sequence[Job], checkout: Path, folder: Path) -> Generator[Process]:
    """Each when it is its turn; the one after it has been started by then."""
    started: list[Process] = []
    try:
        for turn in range(len(wanted)):
            for index in range(len(started), min(turn + 2, len(wanted))):
                started += [Process(wanted[index], checkout, folder / str(index), RANK)]
            started[turn].begin()
            yield started[turn]
    finally:
        for process in started:
            process.stop()


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:  # as `Process` starts it
        rank(Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
    else:
        typer.run(main)
