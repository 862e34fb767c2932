"""Real processes for tests: `run_ranks(body, world_size, *args)` runs `body(rank, *args)` on each.
A test that is nothing but such a body says `@on_cpu_ranks(2)` or `@on_device_ranks(2)`.

CPU ranks are forked for every test: a parent that has imported and prepared everything starts one
in 20 ms. It enters no FakeTensorMode: in a CUDA build of torch that sees no GPU, the next backward
would start threads after which no fork can run backward. GPU ranks take ten seconds to start, so
they serve many tests (`rank_pool`); their bodies must be functions of a module. `on_device` takes
the GPUs if there are some: one a rank, or with TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 as many
ranks as a test wants on those that there are, which NCCL joins by sockets. Kernels of such ranks
take turns, and nothing is said of the memory order between GPUs. If one rank fails all are stopped,
and the failure carries every rank's traceback.
"""

from __future__ import annotations

import faulthandler
import importlib
import inspect
import os
import sys
import time
from collections.abc import Callable
from functools import cache, wraps
from string import Formatter

import pytest
import rank_pool
import torch
import torch.multiprocessing as mp
from rank_process import Ranks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHARED = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"
GPU_RANKS = torch.cuda.device_count()  # that tests may start
if SHARED and DEVICE == "cuda":
    GPU_RANKS = max(4, GPU_RANKS)
# for tests of which GPU is whose, and of races, which take minutes where kernels take turns
OWN_GPUS = pytest.mark.skipif(SHARED or GPU_RANKS < 2, reason="needs two GPUs")
TAKE_TURNS = SHARED and "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in os.environ
SIDE_BY_SIDE = pytest.mark.skipif(
    TAKE_TURNS or GPU_RANKS < 2, reason="needs ranks that run side by side: two GPUs, or MPS"
)
# For tests of what overlaps. Without it interpreted calls are fused too, but on GPUs that the cost
# model knows shards of few rows are left to `sequential`.
FUSED = {"FLUX_MEGATRON_STRATEGY": "fused"}


def here() -> torch.device:
    """The device of this rank's tensors."""
    return torch.empty(0, device=DEVICE).device


def be_late(seconds: float) -> None:
    """Hold back what this rank sends next: on GPUs the stream sleeps, not the host."""
    if DEVICE == "cuda":
        torch.cuda._sleep(int(seconds * 1.5e9))  # cycles
    else:
        time.sleep(seconds)


def on_device(body: Callable, world_size: int, *args, **options) -> list:
    """`run_ranks` on GPUs where there are some, one a rank; skips a test that needs more."""
    if DEVICE == "cuda" and world_size > GPU_RANKS:
        pytest.skip(f"{world_size} ranks need as many GPUs, {GPU_RANKS} here")
    return run_ranks(body, world_size, *args, device=DEVICE, **options)


def run_ranks(
    body: Callable, world_size: int, *args, device: str = "cpu", limit_s: float = 120,
    environment: dict[str, str] | None = None, fresh: bool = False,
) -> list:  # fmt: skip
    """What each rank returned, in rank order. `RankFailure` if any raised or the limit passed.

    `fresh` processes serve this body alone, on GPUs too. In values of `environment` "{rank}" is
    the rank: with CUDA_VISIBLE_DEVICES each sees one GPU, of number 0. CPU ranks are skipped where
    GPUs are seen: kernels are compiled in such a process, and do not take tensors of the CPU.
    """
    if device == "cuda":
        return rank_pool.run(
            body, world_size, args, limit_s=limit_s, environment=environment or {}, fresh=fresh
        )
    if DEVICE == "cuda":
        pytest.skip("ranks on the CPU need a process that sees no GPU: CUDA_VISIBLE_DEVICES=")
    prepare()

    def work(rank: int) -> object:
        faulthandler.dump_traceback_later(limit_s - 1)  # where a rank hangs, before it is killed
        from flux_megatron.overlap.report import reset_report

        reset_report()  # a fork has what its parent counted
        return body(rank, *args)

    ranks = Ranks(world_size, "cpu", mp.get_context("fork"), environment or {}, work)
    try:
        return ranks.answers(limit_s)
    finally:
        ranks.let_go()


def on_cpu_ranks(world_size: int | str, **options) -> Callable[[Callable], Callable]:
    """Of a function of a rank and more arguments makes a test of the latter: `run_ranks` runs it.

    `world_size` may name an argument of the test, and in values of `environment` "{name}" is one.
    """
    return _as_test(run_ranks, world_size, options)


def on_device_ranks(world_size: int | str, **options) -> Callable[[Callable], Callable]:
    """The same by `on_device`."""
    return _as_test(on_device, world_size, options)


def _as_test(run: Callable, world_size: int | str, options: dict) -> Callable[[Callable], Callable]:
    environment = options.pop("environment", {})
    named = [field for value in environment.values() for _, field, *_ in Formatter().parse(value)]
    named.append(world_size if isinstance(world_size, str) else None)

    def of_body(body: Callable) -> Callable:
        args = [*inspect.signature(body).parameters][1:]

        @wraps(body)
        def test(**given) -> None:
            size = given[world_size] if isinstance(world_size, str) else world_size
            variables = {name: value.format(**given) for name, value in environment.items()}
            run(body, size, *(given[name] for name in args), environment=variables, **options)

        test.__signature__ = inspect.Signature(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
            for name in dict.fromkeys([*args, *filter(None, named)])
        )
        body.__qualname__ = f"{body.__name__}.__wrapped__"  # where GPU ranks find it
        return test

    return of_body


@cache
def prepare() -> None:
    """Once here, not once in each fork: what the first call of a process imports and reads, and the
    source of every kernel, which the interpreter rewrites.
    """
    for module in ("flux_megatron.nn.functions", "torch._dynamo", "triton.experimental.gluon"):
        importlib.import_module(module)
    from triton.runtime.interpreter import InterpretedFunction

    from flux_megatron.tuning import environment

    environment.of(torch.device("cpu"))
    for function in _functions_of("flux_megatron.kernels", "triton.language"):
        if isinstance(function, InterpretedFunction):
            function.rewrite()


def _functions_of(*packages: str) -> list[object]:
    modules = [module for name, module in [*sys.modules.items()] if name.startswith(packages)]
    return [value for module in modules for value in [*vars(module).values()]]
