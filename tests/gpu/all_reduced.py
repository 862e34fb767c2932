"""Layers without sequence parallelism beside plain torch and NCCL: GEMM+AR, and where it hides.

    torchrun --nproc-per-node 2 tests/gpu/all_reduced.py rows.jsonl --commit $(git rev-parse HEAD)
    TRITON_INTERPRET=1 torchrun --nproc-per-node 2 tests/gpu/all_reduced.py rows.jsonl --device cpu

A row layer's forward is the operation GEMM+AR, and its backward needs no communication. A column
layer's forward needs none, and its backward, `backward_ar`, sums dx beside wgrad, as Megatron's
does (`megatron`).

First every strategy is exact on small integers in many calls of both kinds of layers, eager and
replayed from a graph, with one rank late: any wrong element ends the run with exit code 1. Then the
bench races the layers of GPT-3 and Llama-2 (`docs/measuring.md`): every strategy in its default
plan and `auto`, eager and as graphs, with `--beside` also beside an all-reduce. Prints us and E of
each; E and `serial` count the faster of both. The rows are the bench's: `flux-megatron bench check`
reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import gpu_run
import torch
import torch.distributed as dist
import typer
from gpu_run import Run
from torch import Tensor

from flux_megatron.bench import records, runner, suites
from flux_megatron.bench.candidates import replayed, with_strategy
from flux_megatron.bench.efficiency import IN_A_GRAPH
from flux_megatron.bench.options import Options
from flux_megatron.bench.records import OK, Row
from flux_megatron.nn import all_reduced
from flux_megatron.overlap import registry
from flux_megatron.problem import Pattern, Problem

PATTERNS = ("gemm_ar", "backward_ar")
EPOCHS = {"cuda": 20, "cpu": 3}
SIZES = {"cuda": (1024, 2048, 1024), "cpu": (16, 32, 16)}  # M, hidden, and the layer's other width
LATE_CYCLES = 2_000_000


class Layers:
    """A column and a row layer, M tokens on every rank; of small integers, so sums are exact.

    `dy` is the row layer's input, and the gradient of the column layer's output.
    """

    def __init__(self, run: Run) -> None:
        self._group, ranks = run.group, run.group.size()
        M, hidden, width = SIZES[run.device.type]
        made = torch.Generator(run.device).manual_seed(1 + run.group.rank())

        def sparse(*shape: int) -> Tensor:
            """With 64 ones a row, on average: sums stay far below 256."""
            ones = torch.rand(shape, device=run.device, generator=made) < 64 / shape[1]
            return ones.to(getattr(torch, run.about.dtype))

        self.x = sparse(M, hidden).requires_grad_()  # of the column layer
        self.column = sparse(width // ranks, hidden).requires_grad_()
        self.dy = sparse(M, width // ranks)
        self.row = sparse(hidden, width // ranks)

    def forward(self) -> Tensor:
        return all_reduced.local_linear(self.x, self.column, None, allreduce_group=self._group)

    def step(self) -> tuple[Tensor, ...]:
        """The row layer on dy, and the column layer's forward and backward."""
        y = all_reduced.row_linear(self.dy, self.row, group=self._group)
        return y, *torch.autograd.grad(self.forward(), (self.x, self.column), self.dy)

    def expected(self) -> tuple[Tensor, ...]:
        y, dx = self.dy @ self.row.t(), self.dy @ self.column.detach()
        for partial in (y, dx):
            dist.all_reduce(partial, group=self._group)
        return y, dx, self.dy.t() @ self.x.detach()

    def problem(self, run: Run) -> Problem:
        M, hidden, width = SIZES[run.device.type]
        return Problem(
            Pattern.GEMM_AR, M, hidden, width, run.about.dtype, run.group.size(), "nn",
            run.device.type,
        )  # fmt: skip


def verify(run: Run) -> bool:
    """Whether every strategy that runs here is exact. On the current stream, not the default one,
    which cannot be captured.
    """
    good, layers = True, Layers(run)
    expected = layers.expected()
    for name in registry.STRATEGIES[Pattern.GEMM_AR]:
        if reason := registry.refusal(layers.problem(run), name, None):
            run.say(f"{name}: {reason}")
            continue
        step = with_strategy(name, layers.step)
        for kind, call in (("eager", step), ("graph", replayed(step))):
            if kind == "graph" and run.device.type == "cpu":
                continue
            wrong, failure = _wrong(run, layers, call, expected)
            good = good and not wrong and not failure
            run.say(f"{name} {kind}: {'exact' if not wrong and not failure else 'WRONG'} {failure}")
    return good


def _wrong(
    run: Run, layers: Layers, call: Callable[[], tuple[Tensor, ...]], expected: tuple[Tensor, ...]
) -> tuple[int, str]:
    """How many elements of all calls are wrong on some rank, or why they fail."""
    wrong, ones = torch.zeros(1, device=run.device), layers.dy.clone()

    def calls() -> None:
        for epoch in range(EPOCHS[run.device.type]):
            if run.device.type == "cuda" and epoch % run.group.size() == run.group.rank():
                torch.cuda._sleep(LATE_CYCLES)
            times = 1 + epoch % 3  # a tile of the epoch before is wrong
            layers.dy.copy_(times * ones)
            for result, right in zip(call(), expected, strict=True):
                wrong.add_((result != times * right).sum())

    failure = run.failure(calls)
    layers.dy.copy_(ones)
    return int(run.slowest(wrong)), failure


def cases(patterns: str, models: str, Ms: str, ranks: int, scale: int) -> Iterator[suites.Case]:
    """Largest M first, GPT-3 before Llama-2."""
    for M in sorted(map(int, Ms.split(",")), reverse=True):
        for pattern in patterns.split(","):
            for model in models.split(","):
                yield from suites.cases(model, pattern, (M,), ranks, scale)


def measure(run: Run, case: suites.Case, options: Options) -> None:
    """The rows of a case in each condition; a line a candidate: us (E) eager, then as a graph."""
    dtype = getattr(torch, run.about.dtype)
    for rows in runner.measure(case, options, run.group, run.device, dtype, {}, run.about):
        if run.first and run.out is not None:
            records.append(run.out, rows)
        by_name = {row.candidate: row for row in rows}
        run.say(f"{case}{', beside' * rows[0].beside}")
        for name, row in by_name.items():
            if row.status == OK and not name.endswith(IN_A_GRAPH):
                run.say(f"  {name:14}{_cell(row)}{_cell(by_name.get(name + IN_A_GRAPH))}")
            elif row.status not in (OK, records.UNSUPPORTED):
                run.say(f"  {name:14}  {row.status}: {row.reason[:80]}")


def _cell(row: Row | None) -> str:
    if row is None or row.status != OK:
        return ""
    efficiency = "" if row.efficiency is None else f"({row.efficiency:.2f})"
    return f"{row.median_us:10.0f} {efficiency:8}{'!' if row.reason else ' '}"


def main(
    out: Path, commit: str = "", device: str = "cuda",
    patterns: Annotated[str, typer.Option(help="gemm_ar, backward_ar")] = ",".join(PATTERNS),
    suite: str = "gpt3-175b,llama2-70b",
    M: Annotated[str, typer.Option("--M")] = "8192,2048,256",
    beside: Annotated[bool, typer.Option("--beside", help="Also beside an all-reduce")] = False,
    rounds: int = 12, seconds: float = 80,
) -> None:  # fmt: skip
    """Be one of the ranks. Case after case, until `seconds` are over."""
    small = device == "cpu"
    run = gpu_run.start_on(device, out, commit, seconds)
    run.say(f"connections {run.about.max_connections}")
    with torch.cuda.stream(None if small else torch.cuda.Stream(run.device)):
        good = verify(run)
    if not good:
        gpu_run.finish(run, 1)
    ranks, scale = run.group.size(), 512 if small else 1
    options = Options(
        (), (), (), "", (), 1 if small else rounds, ranks, device, beside=beside, graphs=not small
    )
    if small:
        suite, M = "llama2-70b", "32"
    for case in cases(patterns, suite, M, ranks, scale):
        if not run.time_left():
            run.say("no time for the others")
            break
        measure(run, case, options)
    gpu_run.finish(run)


if __name__ == "__main__":
    typer.run(main)
