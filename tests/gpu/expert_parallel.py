"""a2a_gemm and gemm_a2a on GPUs: verified, then timed beside all-to-all and grouped GEMM.

    torchrun --standalone --nproc-per-node 2 tests/gpu/expert_parallel.py --out experts.jsonl
    torchrun --standalone --nproc-per-node 2 tests/gpu/expert_parallel.py --device cpu  # rehearsal

Verified: small integers, exact, new counts in every call, eager and in a replayed graph. Timed, in
one race a problem: ours; `nccl`, the collective with splits that are known, a sort of the rows by
expert and a grouped GEMM; `nccl + sync`, which fetches the splits too, as a training step must;
`gemm` and `a2a`, its parts. Counts are those of a uniform router, and of one whose first expert
gets a third of all tokens. Prints ms; rows have all rounds.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import gpu_run
import torch
import torch.distributed as dist
from gpu_run import Run
from torch import Tensor

import flux_megatron
from flux_megatron import reference
from flux_megatron.expert_parallel import ops
from flux_megatron.kernels import a2a_gemm
from flux_megatron.tuning.timing import race

LIMIT_S = 115


@dataclass(frozen=True)
class Model:
    """An expert's GEMMs: hidden to ffn, and back."""

    name: str
    hidden: int
    ffn: int
    experts: int
    topk: int
    tokens: tuple[int, ...]  # of a rank


MODELS = (
    Model("mixtral", 4096, 14336, 8, 2, (4096, 8192)),
    Model("fine 2048", 2048, 2048, 64, 8, (4096,)),
    Model("fine 7168", 7168, 2048, 64, 8, (4096,)),
)
TINY = (Model("tiny", 32, 48, 4, 2, (24,)),)


def routed(rows: int, ranks: int, experts: int, skew: float, seed: int) -> Tensor:
    """int32 [R, E]: `rows` of a rank to all experts, a share `skew` of them to the first."""
    made = torch.Generator().manual_seed(seed)
    share = torch.full((ranks * experts,), (1 - skew) / (ranks * experts))
    share[0] += skew
    chosen = torch.multinomial(share, rows, replacement=True, generator=made)
    return chosen.bincount(minlength=ranks * experts).to(torch.int32).view(ranks, experts)


def everyone(run: Run, mine: Tensor) -> list[Tensor]:
    """Tensors of all ranks, of any sizes, on the host. Collective."""
    found: list = [None] * run.group.size()
    dist.all_gather_object(found, mine.cpu(), group=run.group)
    return found


def integers(run: Run, seed: int, *shape: int) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    values = torch.randint(-1, 2, shape, generator=made) * (torch.rand(shape, generator=made) < 0.2)
    return values.to(run.device, getattr(torch, run.about.dtype))


def verify(run: Run, N: int, K: int, experts: int, most: int, calls: int) -> None:
    """`AssertionError` unless calls with counts of their own are exact, captured ones too."""
    ranks, rank = run.group.size(), run.group.rank()
    w, v = integers(run, rank, experts, N, K), integers(run, 99 + rank, experts, K, N)
    ws, vs = everyone(run, w), everyone(run, v)
    rows, capacity = most, ranks * most + 7
    x = torch.empty(rows, K, dtype=w.dtype, device=run.device)
    counts = torch.zeros(ranks, experts, dtype=torch.int32, device=run.device)

    def both() -> tuple[Tensor, Tensor]:
        hidden, _ = ops.a2a_gemm(x, w, counts, run.group, capacity=capacity)
        return hidden, ops.gemm_a2a(hidden.sign(), v, counts, run.group, tokens=rows)

    graph, replayed = None, None
    for call in range(calls):
        skew = (0.0, 0.9, 0.5)[call % 3]
        counts.copy_(routed(rows, ranks, experts, skew, 10 * call + rank))
        x.copy_(integers(run, call * 7 + rank, rows, K))
        if call == 3 and run.device.type == "cuda":
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                replayed = both()
        if graph is not None and call % 2:
            graph.replay()
            made = replayed
        else:
            made = both()
        flux_megatron.synchronize()
        every, xs = everyone(run, counts), everyone(run, x)
        hidden, _ = reference.a2a_gemm(xs, ws, every, capacity)
        y = reference.gemm_a2a([one.sign() for one in hidden], vs, every)
        for name, got, right in zip(("hidden", "y"), made, (hidden, y), strict=True):
            wrong = int((got.cpu() != right[rank]).sum())
            assert not wrong, f"call {call}: {wrong} elements of {name} are wrong on rank {rank}"


@dataclass
class Baseline:
    """Collective, sort and grouped GEMM; the splits are known, or fetched in each call."""

    run: Run
    counts: Tensor
    fetch: bool

    def __post_init__(self) -> None:
        self.every = self._all_counts()
        self._order()

    def _all_counts(self) -> Tensor:
        """[R sources, R owners, E]"""
        ranks = self.run.group.size()
        every = self.counts.new_empty(ranks, *self.counts.shape)
        dist.all_gather_into_tensor(every.flatten(), self.counts.flatten(), group=self.run.group)
        return every

    def _order(self) -> None:
        """Rows as they come, by (source, expert), in the order (expert, source)."""
        rank = self.run.group.rank()
        came = self.every[:, rank]
        splits = torch.stack([self.every[rank].sum(1), came.sum(1)]).tolist()  # the host waits
        self.sent, self.received = splits
        experts = torch.arange(came.shape[1], device=came.device).repeat(len(came))
        of_row = torch.repeat_interleave(experts, came.flatten(), output_size=sum(self.received))
        self.order = torch.argsort(of_row, stable=True)
        self.back = torch.argsort(self.order)
        self.ends = came.sum(0).cumsum(0).to(torch.int32)

    def _splits(self) -> None:
        if self.fetch:
            self.every = self._all_counts()
            self._order()

    def exchange(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        arrived = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(arrived, x, received, sent, group=self.run.group)
        return arrived

    def a2a_gemm(self, x: Tensor, w: Tensor) -> Tensor:
        self._splits()
        rows = self.exchange(x, self.sent, self.received)
        return grouped(rows.index_select(0, self.order), w, self.ends)

    def gemm_a2a(self, x: Tensor, w: Tensor) -> Tensor:
        self._splits()
        made = grouped(x[: sum(self.received)], w, self.ends)
        return self.exchange(made.index_select(0, self.back), self.received, self.sent)


def grouped(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    if x.device.type == "cuda":
        return torch._grouped_mm(x, w.transpose(-2, -1), offs=ends)
    first = [0, *ends.tolist()]
    return torch.cat([x[a:b] @ e.t() for a, b, e in zip(first, first[1:], w, strict=False)])


def candidates(
    run: Run, model: Model, tokens: int, skew: float
) -> Iterator[tuple[str, dict[str, Callable]]]:
    ranks, experts = run.group.size(), model.experts // run.group.size()
    rows = tokens * model.topk
    counts = routed(rows, ranks, experts, skew, run.group.rank()).to(run.device)
    known, fetched = Baseline(run, counts, False), Baseline(run, counts, True)
    capacity = max(rows, int(known.every.sum((0, 2)).max()))
    dtype = getattr(torch, run.about.dtype)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=run.device, dtype=dtype) / 8

    w, v = random(experts, model.ffn, model.hidden), random(experts, model.hidden, model.ffn)
    x, z = random(rows, model.hidden), random(capacity, model.ffn)
    arrived = random(sum(known.received), model.hidden)
    hidden = z[: sum(known.received)]
    made = random(sum(known.received), model.hidden)
    yield (
        "a2a_gemm",
        {
            "fused": lambda: ops.a2a_gemm(x, w, counts, run.group, capacity=capacity),
            "nccl": lambda: known.a2a_gemm(x, w),
            "nccl + sync": lambda: fetched.a2a_gemm(x, w),
            "gemm": lambda: grouped(arrived, w, known.ends),
            "a2a": lambda: known.exchange(x, known.sent, known.received),
        },
    )
    yield (
        "gemm_a2a",
        {
            "fused": lambda: ops.gemm_a2a(z, v, counts, run.group, tokens=rows),
            "nccl": lambda: known.gemm_a2a(z, v),
            "nccl + sync": lambda: fetched.gemm_a2a(z, v),
            "gemm": lambda: grouped(hidden, v, known.ends),
            "a2a": lambda: known.exchange(made, known.received, known.sent),
        },
    )


def measure(run: Run, model: Model, tokens: int, skew: float, rounds: int) -> None:
    for operation, calls in candidates(run, model, tokens, skew):
        if not run.time_left():
            run.say("no time for the others")
            return
        found = race(calls, group=run.group, device=run.device, rounds=rounds)
        run.row(
            "expert_parallel", model=model.name, operation=operation, tokens=tokens, skew=skew,
            pushers=a2a_gemm.PUSHERS, times_us=found.times_us, failures=found.failures,
        )  # fmt: skip
        ms = {name: found.median_us(name) / 1e3 for name in found.times_us}
        cells = "  ".join(f"{name} {value:.3f}" for name, value in ms.items())
        faster = ms["nccl"] / ms["fused"] if {"nccl", "fused"} <= ms.keys() else float("nan")
        run.say(f"{model.name:10} {tokens:6} skew {skew:.2f} {operation}  {cells}  x{faster:.2f}")
        for name, why in found.failures.items():
            run.say(f"  {name} failed: {why[:300]}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--pushers", type=int, default=a2a_gemm.PUSHERS)
    given = parser.parse_args()
    a2a_gemm.PUSHERS = given.pushers
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    os.environ.setdefault("FLUX_MEGATRON_TIMEOUT_S", "30")
    on_gpu = given.device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    run = gpu_run.start(given.out, given.commit, given.seconds, dtype)
    shapes = (
        ((1040, 512, 4, 700, 12), (528, 512, 32, 1500, 12)) if on_gpu else ((24, 16, 3, 40, 5),)
    )
    for shape in shapes:
        if failure := run.failure(lambda shape=shape: verify(run, *shape)):
            run.say(f"wrong: {failure[:2000]}")
            gpu_run.finish(run, 1)
        run.say(f"exact: N, K, experts a rank, rows, calls = {shape}")
    for model in MODELS if on_gpu else TINY:
        for tokens in model.tokens:
            for skew in (0.0, 0.33):
                measure(run, model, tokens, skew, given.rounds if on_gpu else 2)
    gpu_run.finish(run)


if __name__ == "__main__":
    main()
