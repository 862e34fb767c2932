"""Errors in the middle of a call, and waits that ran out of time: what all later calls say, on
every rank, and how soon.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import Case, check
from ranks import DEVICE, FUSED, here, on_device_ranks

import flux_megatron
from flux_megatron import errors, ops, pieces
from flux_megatron.kernels.triton_launch import Launcher, OutOfResources
from flux_megatron.nn.functions import column_parallel_linear, row_parallel_linear
from flux_megatron.overlap import calls
from flux_megatron.problem import Plan, Tile
from flux_megatron.symm.device import copy_engine
from flux_megatron.symm.status import Status
from flux_megatron.symm.workspace import workspace

SHORT = FUSED | {"FLUX_MEGATRON_TIMEOUT_S": "6"}


def refused(kind: type[Exception] | tuple[type[Exception], ...], call: Callable) -> str:
    """What a call says that must not wait for anybody."""
    started = time.monotonic()
    with pytest.raises(kind) as caught:
        call()
    assert time.monotonic() - started < 3
    return str(caught.value)


def fails(*given: torch.Tensor) -> None:
    raise ZeroDivisionError("no wgrad today")


def _layers(rank: int, kind: str) -> Callable[[], None]:
    """A call of which only rank 1 fails, in the middle."""
    group, wgrad = dist.group.WORLD, fails if rank else None
    x, w = (torch.ones(s, device=DEVICE, requires_grad=True) for s in ((6, 4), (8, 4)))
    if kind == "consume":
        consume = fails if rank else (lambda rows: None)
        return lambda: ops.run_ag_gemm(x.detach(), w.detach(), None, group, consume=consume)
    if kind == "frozen column":  # a gather alone
        x = x.detach()
    if kind == "row":
        y = row_parallel_linear(x, w, group=group, wgrad=wgrad)
    else:
        y = column_parallel_linear(x, w, None, group=group, wgrad=wgrad)
    return y.sum().backward


@pytest.mark.parametrize("kind", ["consume", "column", "frozen column", "row"])
@on_device_ranks(2, environment=SHORT)
def test_an_error_in_the_middle_is_reported_to_every_rank(rank, kind):
    group = dist.group.WORLD
    middle = _layers(rank, kind)
    engine = copy_engine(here())
    dist.barrier()
    if rank == 1:
        join = mock.patch.object(engine, "join", wraps=engine.join)
        with join as joined, pytest.raises(ZeroDivisionError):
            middle()
        assert joined.called, "pushes may still read what the call was given"
    else:
        middle()
    dist.barrier()
    known, new = Case("ag_gemm", 6, 8, 4), Case("gemm_rs", 5, 7, 3)
    for case in (new, known):
        text = refused(errors.GroupBroken, lambda case=case: check(case))
        assert "cannot be used any more: rank 1 failed in the middle of a call: " in text
        assert text.endswith("ZeroDivisionError: no wgrad today")
    with pytest.raises(errors.GroupBroken):
        flux_megatron.confirm_step()
    assert len(workspace(group, here()).open_calls()) == rank * (2 if kind == "column" else 1)
    check(known, dist.new_group([0, 1]))  # another group is as it was


@on_device_ranks(2, environment=SHORT)
def test_the_first_error_is_reported(rank):
    """Rank 0 fails later, and differently."""
    x, w = torch.ones(6, 4, device=DEVICE), torch.ones(8, 4, device=DEVICE)
    store = dist.distributed_c10d._get_default_store()

    def consume(rows: torch.Tensor) -> None:
        if rank == 0:
            store.wait(["rank 1 has failed"])
        raise KeyError(f"of rank {rank}")

    with pytest.raises(KeyError, match=f"of rank {rank}"):
        ops.run_ag_gemm(x, w, None, dist.group.WORLD, consume=consume)
    if rank == 1:
        store.set("rank 1 has failed", "")
    dist.barrier()
    message = refused(errors.GroupBroken, lambda: check(Case("ag_gemm", 6, 8, 4)))
    assert message.endswith("rank 1 failed in the middle of a call: KeyError: 'of rank 1'")


@on_device_ranks(2, environment=SHORT)
def test_a_missing_signal_is_explained_by_the_failure(rank):
    """Rank 1 fails before its pushes: rank 0 learns why nothing comes."""
    x, w = torch.ones(6, 4, device=DEVICE), torch.ones(8, 4, device=DEVICE)
    group = dist.group.WORLD
    space = workspace(group, x.device)

    def begun() -> None:
        with space.guard():
            space.begin("gather", 100)
            fails()

    def done() -> None:
        ops.all_gather_gemm(x, w, group)
        flux_megatron.synchronize()

    done()
    if rank == 1:
        with pytest.raises(ZeroDivisionError):
            begun()
        dist.barrier()
        message = refused(errors.GroupBroken, done)
    else:
        with pytest.raises((errors.SignalTimeout, errors.GroupBroken)) as caught:
            done()
        dist.barrier()
        message = str(caught.value)
    assert "rank 1 failed in the middle of a call: ZeroDivisionError: no wgrad today" in message


@on_device_ranks(2, environment=SHORT)
def test_errors_before_a_call_break_nothing(rank):
    x, w = torch.ones(6, 4, device=DEVICE), torch.ones(8, 4, device=DEVICE)
    group = dist.group.WORLD
    scatter = pieces.start_gemm_rs(x, w, group)
    for bad in (
        lambda: pieces.start_gemm_rs(x, w, group),
        lambda: ops.run_ag_gemm(x, w[:, :3].contiguous(), None, group),
    ):
        with pytest.raises((errors.WorkspaceError, ValueError)):
            bad()
    scatter.finish()
    check(Case("gemm_rs", 3, 8, 4))
    check(Case("ag_gemm", 6, 8, 4))


def too_large(*given: object) -> None:
    raise OutOfResources(245_760, 232_448, "shared memory")


FEW = Plan("low_latency", tile=Tile(16, 16, 16))
# calls that begin with their kernel: nothing has been sent when the GPU refuses it
BY_KERNEL = {
    "words": [Case(name, 2, 8, 4, plan=FEW) for name in ("ag_gemm", "gemm_rs")],
    "tiles": [Case("gemm_rs", 5, 7, 3)],
}


@pytest.mark.parametrize("kind", BY_KERNEL)
@on_device_ranks(2, environment=SHORT)
def test_a_kernel_that_no_gpu_can_hold_breaks_nothing(rank, kind):
    """All ranks fail alike, before and after calls that succeed, and another plan goes on."""
    for case in BY_KERNEL[kind] * 2:
        with mock.patch.object(Launcher, "_launch", too_large), pytest.raises(OutOfResources):
            check(case)
        assert not workspace(dist.group.WORLD, here()).open_calls()
        check(case)
        check(replace(case, plan=Plan("sequential")))


@pytest.mark.parametrize("captures", [False, True])
@on_device_ranks(2, environment=SHORT)
def test_else_a_kernel_that_no_gpu_can_hold_breaks_the_call(rank, captures):
    """A call whose rows are sent, and one in a capture, which has begun otherwise."""
    case = BY_KERNEL["tiles"][0] if captures else Case("ag_gemm", 6, 8, 4)
    captured = mock.patch.object(calls, "capturing", return_value=captures)
    refused_launch = mock.patch.object(Launcher, "_launch", too_large)
    with refused_launch, captured, pytest.raises(OutOfResources):
        check(case)
    dist.barrier()
    assert "OutOfResources" in refused(errors.GroupBroken, lambda: check(Case("gemm_rs", 5, 7, 3)))


@on_device_ranks(2, environment=SHORT | {"FLUX_MEGATRON_TIMEOUT_S": "2"}, fresh=True)
def test_a_kernel_that_one_gpu_cannot_hold_is_a_late_rank_to_the_other(rank):
    """Soon enough, and the rank whose call was taken back learns it at its next one."""
    x, w = torch.ones(2, 4, device=DEVICE), torch.ones(8, 4, device=DEVICE)
    call = partial(ops.gemm_reduce_scatter, x, w, dist.group.WORLD, plan=FEW)
    call()
    dist.barrier()
    started = time.monotonic()
    if rank == 1:
        with mock.patch.object(Launcher, "_launch", too_large), pytest.raises(OutOfResources):
            call()
    else:
        late = pytest.raises(errors.SignalTimeout, match="for words of rank 1: epoch 2 expected")
        with late:
            call()
            flux_megatron.synchronize()
        assert time.monotonic() - started < 5
    dist.barrier()
    text = refused((errors.GroupBroken, errors.SignalTimeout), call)
    assert "rank 0 of group 0 waited 2 s" in text


@on_device_ranks(2, environment=SHORT)
def test_after_one_wait_ran_out_of_time_no_other_waits(rank):
    """A host that does not look, as one that enqueues ahead of a GPU; rank 1 has gone."""
    group = dist.group.WORLD
    cases = Case("ag_gemm", 3, 5, 4), Case("gemm_rs", 3, 5, 4)
    for case in cases:
        check(case, group)
    x, w, six = (torch.ones(rows, 4, device=DEVICE) for rows in (3, 5, 6))
    if rank == 1:
        time.sleep(12)
        return
    started = time.monotonic()
    with mock.patch.object(Status, "late", return_value=""):
        for _ in range(6):
            ops.all_gather_gemm(x, w, group)
            ops.gemm_reduce_scatter(six, w, group)
    with pytest.raises(errors.SignalTimeout) as caught:
        flux_megatron.synchronize()
    assert 5.9 < time.monotonic() - started < 10, "twelve calls wait as long as one"
    first = str(caught.value)
    assert "rank 0 of group 0 waited 6 s for communication tile 0 of rank 1: epoch 2 exp" in first
    for case in cases:
        text = refused(errors.SignalTimeout, lambda case=case: check(case, group))
        assert text.partition(" (")[0] == first.partition(" (")[0], "only the first is reported"
