"""The tutorial's kernel, all-gather + RMSNorm in one, beside NCCL's all-gather and `F.rms_norm`.

    torchrun --nproc-per-node 2 tests/gpu/own_kernel_speed.py --out own_kernel.jsonl
    TRITON_INTERPRET=1 torchrun --nproc-per-node 2 tests/gpu/own_kernel_speed.py --device cpu

First every candidate's results of back-to-back calls are compared, exactly, with fp64 on operands
for which RMSNorm is exact, with one rank late; exit code 1 if one is wrong. On GPUs each candidate
is a CUDA graph. Then the candidates of a shape are timed in turns.

| candidate | what it is |
| --- | --- |
| library | `all_gather_into_tensor`, then `F.rms_norm` |
| triton n | scripts/own_kernel.py with tiles of n elements |
| gluon n | scripts/own_kernel_gluon.py, on compute capability 9 |
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import gpu_run
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import flux_megatron
from flux_megatron.device import Channel
from flux_megatron.tuning.timing import race

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS), str(TESTS.parent / "scripts")]
import own_kernel  # noqa: E402
from own_kernel_cases import EPS, exact_shard, exact_weight  # noqa: E402

SECONDS = 90
SHAPES = ((2048, 12288), (8192, 8192), (16384, 4096))  # M of all ranks, N
SMALL = ((24, 32),)
BLOCKS = (4096, 16384)
CALLS = 6
DTYPE = torch.bfloat16

Operator = Callable[[Tensor, Tensor], Tensor]


def operators(run: gpu_run.Run) -> dict[str, Operator]:
    """x [M_shard, N], weight [N]  ->  y [M, N]."""

    def library(x: Tensor, weight: Tensor) -> Tensor:
        gathered = x.new_empty(run.group.size() * x.shape[0], x.shape[1])
        dist.all_gather_into_tensor(gathered, x, group=run.group)
        return F.rms_norm(gathered, (x.shape[1],), weight, EPS)

    modules = {"triton": own_kernel}
    if run.device.type == "cuda" and torch.cuda.get_device_capability()[0] == 9:
        import own_kernel_gluon

        modules["gluon"] = own_kernel_gluon
    channel = Channel("all_gather_rms_norm", run.group, run.device)
    found: dict[str, Operator] = {"library": library}
    for name, module in modules.items():
        for elements in BLOCKS:
            call = module.all_gather_rms_norm
            found[f"{name} {elements}"] = lambda x, weight, call=call, elements=elements: call(
                x, weight, channel, EPS, elements
            )
    return found


def captured(operator: Operator, x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    """The call on these operands; on a GPU a graph of it, which keeps what the call made."""
    if x.device.type == "cpu":
        return lambda: operator(x, weight)
    operator(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = operator(x, weight)

    def replay() -> Tensor:
        graph.replay()
        return y

    return replay


def wrong(call: Callable[[], Tensor], x: Tensor, weight: Tensor, run: gpu_run.Run) -> str:
    """The first call whose result is not the reference, or nothing."""
    rank, found = run.group.rank(), ""
    for number in range(CALLS):
        x.copy_(exact_shard(number, rank, *x.shape, x.dtype, str(run.device)))
        right = own_kernel.reference(x, weight, run.group, EPS)
        if x.is_cuda and number % run.group.size() == rank:
            torch.cuda._sleep(2_000_000)
        y = call()
        flux_megatron.synchronize()
        if count := int((y != right).sum()):
            found = found or f"call {number}: {count} of {y.numel()} elements are wrong"
    return found


def measure(shape: tuple[int, int], run: gpu_run.Run, rounds: int) -> bool:
    """Verify and time all candidates; whether every one is right on every rank."""
    M, N = shape
    x = torch.empty(M // run.group.size(), N, dtype=DTYPE, device=run.device)
    weight = exact_weight(N, DTYPE).to(run.device)
    calls = {name: captured(one, x, weight) for name, one in operators(run).items()}
    bad = False
    for name, call in calls.items():
        error = wrong(call, x, weight, run)
        if error:
            print(f"rank {run.group.rank()}: {shape} {name}: {error}", flush=True)
        # the library rounds where it likes: it is no candidate of this check
        bad |= bool(error) and name != "library"
    if run.slowest(torch.tensor(float(bad))):
        return False
    found = race(calls, group=run.group, device=run.device, rounds=rounds)
    texts = []
    for name, times_us in found.times_us.items():
        speedup = round(found.median_us("library") / found.median_us(name), 3)
        texts.append(f"{name} {found.median_us(name):.1f} us ({speedup}x)")
        run.row(
            "own_kernel", M=M, N=N, candidate=name, graph=x.is_cuda,
            median_us=round(found.median_us(name), 2), times_us=[round(t, 2) for t in times_us],
            speedup_over_library=speedup,
        )  # fmt: skip
    run.say(f"{M} x {N}: exact; " + ", ".join(texts))
    for name, failure in found.failures.items():
        run.say(f"{M} x {N} {name}: {failure}")
    return True


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(arguments)
    if (options.device == "cuda") != torch.cuda.is_available():
        parser.error(f"--device {options.device} given, this machine has other ones")
    run = gpu_run.start(options.out, options.commit, SECONDS, DTYPE)
    for shape in SMALL if options.device == "cpu" else SHAPES:
        if not run.time_left():
            run.say(f"no time left for {shape}")
        elif not measure(shape, run, options.rounds):
            gpu_run.finish(run, 1)
    gpu_run.finish(run)


if __name__ == "__main__":
    main(sys.argv[1:])
