"""Calls of GPUs that reach none of each other, by mailboxes in the host's memory. The protocol is
tested without GPUs in `protocol/test_mailboxes.py`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from cases import ON_HOPPER, Case, check, check_all, hopper_cases
from layer_cases import check as check_layer
from layer_cases import layer
from ranks import SIDE_BY_SIDE, be_late, on_device_ranks
from test_graphs import HOPPER, PLANS, replays

import flux_megatron
from flux_megatron import errors, ops
from flux_megatron.overlap.report import report
from flux_megatron.problem import Plan
from flux_megatron.symm import cuda_memory
from flux_megatron.symm.workspaces import workspace

pytestmark = [
    SIDE_BY_SIDE, pytest.mark.skipif(not torch.cuda.is_available(), reason="mailboxes are of GPUs"),
]  # fmt: skip
NEEDS_HOPPER = pytest.mark.skipif(
    not ON_HOPPER, reason="`hopper` needs GPUs of compute capability 9"
)
PATTERNS = ("ag_gemm", "gemm_rs", "gemm_ar")
BY_LIBRARY = [Plan("pipelined", comm_rows=24), Plan("pipelined", gemms=1)]


def reach_nobody() -> None:
    cuda_memory.why_not_shared = lambda group, device: "no GPU reaches another"


def made_by(strategy: str, cases: list[Case]) -> None:
    check_all(cases)
    flux_megatron.check()
    assert workspace(dist.group.WORLD, torch.device("cuda", torch.cuda.current_device())).mailboxes
    assert {by for _, by in report().calls} == {strategy}


@pytest.mark.parametrize("pattern", PATTERNS)
@on_device_ranks(2)
def test_library_gemms_are_exact(rank, pattern):
    reach_nobody()
    shapes = [(40, 24, 16), (256, 520, 64), (1, 8, 16), (333, 264, 72)]
    made_by("pipelined", [
        Case(pattern, *shape, dtype=torch.bfloat16, kept=0.3, plan=plan, seed=seed)
        for seed, shape in enumerate(shapes * 3) for plan in BY_LIBRARY
    ])  # fmt: skip


@NEEDS_HOPPER
@pytest.mark.parametrize("pattern", PATTERNS)
@on_device_ranks(2)
def test_hopper_is_exact(rank, pattern):
    reach_nobody()
    able = [one for one in hopper_cases(pattern, 2) if "engine" in one.plan.transport]
    made_by("hopper", [replace(one, lacking=0) for one in able])


@pytest.mark.parametrize("plan", [
    pytest.param(PLANS["pipelined"], id="pipelined"),
    pytest.param(HOPPER["hopper"], id="hopper", marks=NEEDS_HOPPER),
    pytest.param(HOPPER["hopper by engines"], id="engines", marks=NEEDS_HOPPER),
])  # fmt: skip
@on_device_ranks(2)
def test_replays_between_eager_calls(rank, plan):
    reach_nobody()
    replays(rank, plan)


@on_device_ranks(2, environment={"FLUX_MEGATRON_STRATEGY": "pipelined"})
def test_layers_forward_and_backward(rank):
    reach_nobody()
    for kind in ("column", "row"):
        check_layer(layer(kind, 2, torch.float32, (6,), 8, 6, False), rank, "xw")
    assert report().calls == {("gemm_rs", "pipelined"): 2, ("ag_gemm", "pipelined"): 2}


@on_device_ranks(2)
def test_many_calls_of_late_ranks(rank):
    reach_nobody()
    cases = [Case(pattern, 24, 16, 8, plan=BY_LIBRARY[0]) for pattern in PATTERNS[:2]]
    for number in range(40):
        if number % 7 == 3 * rank:
            be_late(0.01)
        check(replace(cases[number % 2], seed=number))


@NEEDS_HOPPER
@pytest.mark.parametrize("connections", ["8", "1"])
@on_device_ranks(2, environment={"CUDA_DEVICE_MAX_CONNECTIONS": "{connections}"}, fresh=True)
def test_sums_travel_early_in_one_queue_too(rank):
    reach_nobody()
    case = Case("gemm_ar", 512, 520, 512, dtype=torch.bfloat16, kept=0.2,
                plan=HOPPER["hopper by engines"])  # fmt: skip
    for number in range(20):
        if number % 7 == 3 * rank:
            be_late(0.01)
        check(replace(case, seed=number))


IN_ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "{connections}", "FLUX_MEGATRON_TIMEOUT_S": "2"}


@pytest.mark.parametrize("connections", ["8", "1"])
@on_device_ranks(2, environment=IN_ONE_QUEUE, fresh=True)
def test_a_wait_for_a_rank_that_does_not_come_ends(rank):
    """Also where kernels stand behind the stream's waits."""
    reach_nobody()
    x, w = torch.ones(64, 32, device="cuda"), torch.ones(16, 32, device="cuda")
    call = partial(ops.all_gather_gemm, x, w, dist.group.WORLD, plan=BY_LIBRARY[0])
    call()
    dist.barrier()
    if rank == 0:
        started = time.monotonic()
        call()
        with pytest.raises(errors.SignalTimeout, match="of rank 1: epoch 2 expected"):
            flux_megatron.synchronize()
        assert time.monotonic() - started < 6
    dist.barrier()
    with pytest.raises((errors.GroupBroken, errors.SignalTimeout)):  # noqa: PT012, as on GPUs
        call()  # that of rank 1 finds what rank 0 has sent, and the next one nothing
        call()
        flux_megatron.synchronize()
