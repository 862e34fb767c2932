"""Which GPU a rank's process sees and uses: one GPU each, of the same number, as under Ray; no
`set_device`; a thread that has not used a GPU yet. All are exact and overlap.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from unittest import mock

import cases
import layer_cases
import pytest
import ranks
import test_embedding
import test_expert_parallel
import torch
import torch.distributed as dist
from cases import ON_HOPPER, Case, operands
from closeness import assert_exact
from layer_cases import layer
from ranks import GPU_RANKS, OWN_GPUS, run_ranks
from test_repeated_calls import counted

import flux_megatron
from flux_megatron import ops, settings
from flux_megatron.nn import functions, linear_passes, norm
from flux_megatron.patterns import Pattern
from flux_megatron.problem import Plan, Tile
from flux_megatron.symm import copies
from flux_megatron.symm.workspaces import workspaces
from flux_megatron.tuning import link

pytestmark = [pytest.mark.gpus(2), pytest.mark.skipif(GPU_RANKS < 2, reason="needs two GPUs")]

STRATEGIES = ("auto", "hopper", "fused", "pipelined", "low_latency", "signalled")
CALLS = 6  # the last of them by lists
BY_LIST = ("low_latency", "pipelined", "hopper" if ON_HOPPER else "fused")
SHORT = {"FLUX_MEGATRON_TIMEOUT_S": "20"}
ONE_EACH = {"CUDA_VISIBLE_DEVICES": "{rank}", **SHORT}


@contextmanager
def strategy(name: str) -> Iterator[None]:
    with mock.patch.dict(os.environ, FLUX_MEGATRON_STRATEGY=name):
        settings.reload()
        yield
    settings.reload()


def call(pattern: Pattern, wanted: str, device: torch.device) -> tuple[Callable, torch.Tensor]:
    """An operation on this rank's shards, and what it must give."""
    rows = 8 if wanted == "low_latency" else 256
    rank = dist.get_rank()
    given = operands(Case(pattern, rows, 512, 512, dtype=torch.bfloat16, kept=0.15), 2)
    x, w = given.x[rank].to(device), given.w[rank].to(device)
    return lambda: ops.OPERATIONS[pattern](x, w, dist.group.WORLD), given.expected[rank]


def every_strategy(device: torch.device) -> None:
    """Every pattern by every strategy, each call overlapped; and both layers' backward."""
    for wanted in STRATEGIES if ON_HOPPER else [one for one in STRATEGIES if one != "hopper"]:
        flux_megatron.reset_report()
        with strategy(wanted):
            for pattern in ops.OPERATIONS:
                run, expected = call(pattern, wanted, device)
                for number in range(CALLS):
                    assert_exact(run(), expected, f"{wanted} {pattern} call {number}")
        report = flux_megatron.report()
        assert not report.fallbacks, f"{wanted}: {report}"
        if wanted != "auto":
            assert report.overlapped == report.total == 3 * CALLS, f"{wanted}: {report}"
    for kind in ("column", "row"):
        made = layer(kind, 2, torch.bfloat16, (128, 2), 256, 512, bias=True, kept=0.15)
        for _ in range(CALLS):
            layer_cases.check(made, dist.get_rank())
    flux_megatron.confirm_step()


def with_one_gpu(rank: int) -> tuple[int, str, str | None]:
    every_strategy(torch.device("cuda", 0))
    (space,) = workspaces()
    return torch.cuda.device_count(), link.of(torch.device("cuda", 0)), space.unavailable


def seen(rank: int) -> str:
    return link.of(torch.device("cuda", rank))


@OWN_GPUS
def test_ranks_that_see_one_gpu_each():
    """The link is that of ranks which see all GPUs, but hidden from these: plans are their own."""
    links = run_ranks(seen, 2, device="cuda")
    expected = [(1, name + link.HIDDEN, None) for name in links]
    assert run_ranks(with_one_gpu, 2, device="cuda", environment=ONE_EACH, limit_s=240) == expected


WIDE = Tile(128, 256, 64, group_m=16, num_stages=3, tma=True)
NARROW = Tile(128, 128, 64, group_m=16, num_stages=5, tma=True)
# In which more tiles wait for other ranks than there are SMs, so that no copy gets one of these.
FULL = [
    *(
        Case("gemm_rs", 4096, 2048, 1024, dtype=torch.bfloat16, kept=0.05, plan=plan)
        for plan in (
            Plan("hopper", 1024, WIDE, transport="copy_engine"),
            Plan("hopper", 512, NARROW, transport="copy_engine"), Plan("pipelined", 512),
        )
    ),
    Case(
        "ag_gemm", 4096, 2048, 2048, dtype=torch.bfloat16, kept=0.05, plan=Plan("hopper", 512, WIDE)
    ),
]  # fmt: skip


def full(rank: int) -> int:
    for case in FULL if ON_HOPPER else FULL[2:3]:
        given = operands(case, 2, "cuda")
        for number in range(CALLS):
            y = cases.call(case, given, dist.group.WORLD)
            assert_exact(y, given.expected[rank], f"{case} call {number}")
    return copies.spare_sms(torch.device("cuda", 0))


@OWN_GPUS
@pytest.mark.parametrize(("environment", "spare"), [(ONE_EACH, copies.SMS), (SHORT, 0)])
def test_pushes_come_while_kernels_hold_all_sms(environment, spare):
    """Where ranks do not see the GPUs to which they copy, SMs make the copies."""
    given = {"device": "cuda", "environment": environment, "limit_s": 240}
    assert run_ranks(full, 2, **given) == [spare, spare]


def unshared(rank: int) -> tuple[int, dict, str | None]:
    """As if the driver refused one rank, also memory of the host."""
    from flux_megatron.symm import cuda_memory, mailbox

    if rank == 0:
        cuda_memory.Mapping = mock.Mock(side_effect=RuntimeError("cuMemMap failed: closed"))
        mailbox.Registered = mock.Mock(side_effect=RuntimeError("cuMemHostRegister failed"))
    device = torch.device("cuda", 0)
    run, expected = call(Pattern.AG_GEMM, "pipelined", device)
    with strategy("pipelined"), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(CALLS):
            assert_exact(run(), expected)
    (space,) = workspaces()
    lines = [one for one in said if "share no memory" in str(one.message)]
    return len(lines), flux_megatron.report().calls, space.unavailable


@OWN_GPUS
def test_gpus_that_share_no_memory_fall_back_and_say_so_once():
    for lines, calls, reason in run_ranks(unshared, 2, device="cuda", environment=ONE_EACH):
        assert lines == 1
        assert calls == {("ag_gemm", "sequential"): CALLS}
        assert "rank 0: cuMemMap failed: closed" in reason


def without_set_device(rank: int) -> int:
    """The tensors are on the group's GPU, the current device is 0; with the tests of others."""
    torch.cuda.set_device(0)
    device = torch.device("cuda", rank)
    for module in (ranks, cases, layer_cases, test_embedding, test_expert_parallel):
        module.DEVICE = str(device)
    every_strategy(device)
    test_embedding.exact_calls(rank, [test_embedding.CASES["odd sizes"]], "fused")
    for name in ("small tiles", "fused", "sequential"):
        plan, routings = test_expert_parallel.PLANS[name], test_expert_parallel.ROUTINGS[:2]
        test_expert_parallel.calls(rank, plan, ("nt", "nn"), routings)
    x = torch.randn(64, 512, device=device, requires_grad=True)
    weight = torch.ones(512, device=device, requires_grad=True)
    for _ in range(CALLS):
        y = norm.rms_norm(x, weight)
        y.sum().backward()
        expected = torch.nn.functional.rms_norm(x, (512,), weight, 1e-5)
        assert torch.allclose(y, expected, atol=1e-5)
    assert torch.cuda.current_device() == 0
    return torch.cuda.memory_allocated(0) if rank else 0


@OWN_GPUS
def test_ranks_that_set_no_device():
    """Nor is memory of another rank's GPU taken."""
    answers = run_ranks(
        without_set_device, 2, device="cuda", environment=SHORT, limit_s=240, fresh=True
    )
    assert answers == [0, 0]


def in_new_threads(rank: int, native: bool, current: bool) -> None:
    """Each call of another thread, whose first use of a GPU it is; last autograd's own thread."""
    device = torch.device("cuda", torch.cuda.current_device())
    if not current:
        torch.cuda.set_device(0)
    for wanted in BY_LIST:
        with strategy(wanted):
            for pattern in ops.OPERATIONS:
                run, expected = call(pattern, wanted, device)
                for _ in range(CALLS):
                    assert_exact(run(), expected)
                with counted() as by_list:
                    for _ in range(2):  # of each parity
                        assert_exact(in_a_new_thread(run), expected, f"{wanted} {pattern}")
                assert by_list == [native] * 2, f"{wanted} {pattern}"
    with strategy("pipelined"), counted() as by_list:
        backward_of_a_new_thread(rank, device)
    assert by_list[-2:] == [True] * 2 if native else not any(by_list)


def in_a_new_thread(run: Callable[[], torch.Tensor]) -> torch.Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result(60)


def backward_of_a_new_thread(rank: int, device: torch.device) -> None:
    made = layer("column", 2, torch.bfloat16, (256,), 512, 512, bias=False, kept=0.15)
    x, w = (one[rank].to(device).requires_grad_() for one in (made.x, made.w))
    dy = made.dy[rank].to(device)
    options = linear_passes.Options("column", dist.group.WORLD)
    with torch.no_grad():  # lists of its pieces, which autograd's thread runs first of all
        for _ in range(CALLS):
            linear_passes.backward(dy, x, w, x.shape, options, (True, True, False))
    y = functions.column_parallel_linear(x, w, None, group=dist.group.WORLD)
    y.backward(dy)
    assert_exact(x.grad, made.dx[rank], "dx")
    assert_exact(w.grad, made.dw[rank], "dw")


@pytest.mark.parametrize("current", [True, False])
@pytest.mark.parametrize("native", [True, False])
def test_the_first_use_of_a_gpu_by_a_thread(native, current):
    environment = {"FLUX_MEGATRON_NATIVE": str(int(native)), **SHORT}
    given = {"device": "cuda", "environment": environment, "limit_s": 240, "fresh": True}
    run_ranks(in_new_threads, 2, native, current, **given)
