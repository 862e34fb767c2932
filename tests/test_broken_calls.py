"""Errors in the middle of a call, and waits that ran out of time: what all later calls say, on
every rank, and how soon.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import Case, check, fail_in_a_call, forget_programs
from closeness import assert_exact
from ranks import DEVICE, FUSED, here, on_cpu_ranks, on_device_ranks

import flux_megatron
from flux_megatron import errors, ops, settings
from flux_megatron.kernels.triton_launch import Launcher, OutOfResources
from flux_megatron.nn.functions import column_parallel_linear, row_parallel_linear
from flux_megatron.overlap import calls
from flux_megatron.problem import Plan, Tile
from flux_megatron.symm.channel import Channel
from flux_megatron.symm.program import CallProgram
from flux_megatron.symm.status import Status
from flux_megatron.symm.workspaces import workspace

take_back = Channel.take_back
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


def _layers(failing: object, kind: str) -> Callable[[], None]:
    """A call in whose middle this rank fails, or not."""
    group, wgrad = dist.group.WORLD, fails if failing else None
    x, w = (torch.ones(s, device=DEVICE, requires_grad=True) for s in ((6, 4), (8, 4)))
    if kind == "consume":
        consume = fails if failing else (lambda rows: None)
        return lambda: ops.run_ag_gemm(x.detach(), w.detach(), None, group, consume=consume)
    if kind.startswith("frozen"):  # a gather alone
        x = x.detach()
    if "row" in kind:
        y = row_parallel_linear(x, w, group=group, wgrad=wgrad)
    else:
        y = column_parallel_linear(x, w, None, group=group, wgrad=wgrad)
    return y.sum().backward


KINDS = ["consume", "column", "frozen column", "row", "frozen row"]
STRATEGIES = ["fused", "pipelined", "signalled", "sequential"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_device_ranks(2, environment=SHORT)
def test_an_error_in_the_caller_s_turn_ends_no_group(rank, strategy):
    """On one rank or on all alike, as out of memory: the call is finished, the next are right."""
    os.environ["FLUX_MEGATRON_STRATEGY"] = strategy
    settings.reload()
    for kind, failing in itertools.product(KINDS, ((1,), (0, 1))):
        middle = _layers(rank in failing, kind)
        with pytest.raises(ZeroDivisionError) if rank in failing else nullcontext():
            middle()
        assert not workspace(dist.group.WORLD, here()).open_calls(), kind
        for case in (Case("ag_gemm", 6, 8, 4), Case("gemm_rs", 5, 7, 3)):
            check(case)
    flux_megatron.confirm_step()


@on_device_ranks(2, environment=SHORT | {"FLUX_MEGATRON_TIMEOUT_S": "2"}, fresh=True)
def test_a_rank_that_does_not_go_on_after_its_error_is_late(rank):
    """It has raised already; the other one learns soon enough for whom it waits."""
    case, x = Case("ag_gemm", 6, 8, 4), torch.ones(6, 4, device=DEVICE)
    w = torch.ones(8, 4, device=DEVICE)
    check(case)
    middle = _layers(rank, "row")
    dist.barrier()
    if rank:
        with pytest.raises(ZeroDivisionError):
            middle()
        dist.barrier()
        ops.all_gather_gemm(x, w, dist.group.WORLD)  # what rank 0 has sent for it has come
        text = refused((errors.GroupBroken, errors.SignalTimeout), lambda: check(case))
        assert "rank 0 of group 0 waited 2 s" in text
        return
    middle()
    started = time.monotonic()
    with pytest.raises(errors.SignalTimeout, match="of rank 1: epoch"):  # noqa: PT012, as on GPUs
        ops.all_gather_gemm(x, w, dist.group.WORLD)
        flux_megatron.synchronize()
    assert time.monotonic() - started < 5
    dist.barrier()


def _no_memory(*given: object, **options: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("strategy", ["fused", "pipelined"])
@on_device_ranks(2, environment=SHORT)
def test_no_memory_for_a_result_ends_no_group(rank, strategy, first):
    """Of all ranks alike, in the first call of a program or in a later one."""
    group, space = dist.group.WORLD, workspace(dist.group.WORLD, here())
    x, w = torch.ones(6, 4, device=DEVICE), torch.ones(8, 4, device=DEVICE)
    for operation in (ops.all_gather_gemm, ops.gemm_reduce_scatter):
        call = partial(operation, x, w, group, plan=Plan(strategy))
        for _ in range(4):
            call()
        if first:
            forget_programs(space)
        taken_back = mock.patch.object(Channel, "take_back", autospec=True, wraps=None)
        with mock.patch.object(torch.Tensor, "new_empty", _no_memory), taken_back as took:
            took.side_effect = take_back
            with pytest.raises(torch.OutOfMemoryError):
                call()
        assert took.called
        assert not space.open_calls()
        y = call()
        rows = 4.0 * (1 if operation is ops.all_gather_gemm else 2)
        assert_exact(y, torch.full(y.shape, rows))
    flux_megatron.confirm_step()


@pytest.mark.parametrize("strategy", ["fused", "pipelined", "sequential"])
@on_device_ranks(2, environment=SHORT, fresh=True)
def test_no_memory_on_one_rank_mixes_no_rows_of_two_calls(rank, strategy):
    """It leaves a call out, and its next one has other rows: nobody may take them for those."""
    group, w = dist.group.WORLD, torch.eye(4, device=DEVICE)
    plan = Plan(strategy)
    ops.all_gather_gemm(torch.zeros(6, 4, device=DEVICE), w, group, plan=plan)
    for batch in range(1, 4):
        x = torch.full((6, 4), float(batch), device=DEVICE)
        if batch == 1 and rank == 0:
            lacks = mock.patch.object(torch.Tensor, "new_empty", _no_memory)
            with lacks, pytest.raises(torch.OutOfMemoryError):
                ops.all_gather_gemm(x, w, group, plan=plan)
            continue
        try:
            y = ops.all_gather_gemm(x, w, group, plan=plan)
            flux_megatron.synchronize()
        except errors.FluxError as error:
            said = str(error)
            break
        assert_exact(y, torch.full_like(y, batch))
    assert "a call after one that has failed" in said
    store = dist.distributed_c10d._get_default_store()  # NCCL's kernel never ends
    store.set(f"rank {rank} has been told", "")
    store.wait(["rank 0 has been told", "rank 1 has been told"])


@on_cpu_ranks(2, environment=SHORT)
def test_who_has_failed_alone_tells_ranks_that_wait_without_a_bound(rank):
    """As for a collective of NCCL, until they ask."""
    space = workspace(dist.group.WORLD, here())
    if rank == 0:
        space.failed_alone = True
        with pytest.raises(errors.ProblemMismatch, match="rank 1: no answer"):
            space.note("a call")
    dist.barrier()
    assert "a call after one that has failed" in refused(errors.GroupBroken, space.ask)
    dist.barrier()
    flux_megatron.release()  # none of the group's collectives was half made
    check(Case("ag_gemm", 6, 8, 4))


@pytest.mark.parametrize("rows", [6, 7])
@on_device_ranks(2, environment=SHORT)
def test_no_memory_on_one_rank_is_mended_by_release(rank, rows):
    """Where the call has none of the group's collectives: the other one waits in a kernel. Steps of
    new rows may need memory too, before it is known what they are.
    """
    space, call = workspace(dist.group.WORLD, here()), Case("ag_gemm", 6, 8, 4, plan=Plan("fused"))
    check(call)
    if rank == 0:
        lacks = mock.patch.multiple(torch.Tensor, new_empty=_no_memory)
        if rows != 6:
            lacks = mock.patch.multiple(CallProgram, built_by=_no_memory)
        with lacks, pytest.raises(torch.OutOfMemoryError):
            ops.all_gather_gemm(*(torch.ones(n, 4, device=DEVICE) for n in (rows, 8)),
                                dist.group.WORLD, plan=call.plan)  # fmt: skip
        assert (space.failed_alone, space.half_made) == (True, rows != 6)
    dist.barrier()
    flux_megatron.release()
    check(call)


@on_device_ranks(2, environment=SHORT)
def test_an_interrupt_while_a_call_is_closed_is_reported(rank):
    """What is open then would never be closed."""
    call = Case("ag_gemm", 6, 8, 4, plan=Plan("fused"))
    check(call)
    if rank == 1:
        closed = mock.patch.object(Channel, "end", side_effect=KeyboardInterrupt)
        with closed, pytest.raises(KeyboardInterrupt):
            check(call)
    else:
        check(call)
    dist.barrier()
    assert "KeyboardInterrupt" in refused(errors.GroupBroken, lambda: check(call))
    flux_megatron.release()
    check(call)


@pytest.mark.parametrize("strategy", ["sequential", "signalled"])
@on_cpu_ranks(2, environment=SHORT | {"FLUX_MEGATRON_TIMEOUT_S": "2"})
def test_a_wait_for_gloo_is_bounded_and_no_release_mends_its_group(rank, strategy):
    group = dist.new_group([0, 1])
    call = Case("ag_gemm", 6, 8, 4, plan=Plan(strategy))
    check(call, group)
    if rank == 0:
        with pytest.raises(errors.SignalTimeout, match="rank 0 of group 1 waited 2 s for a coll"):
            check(call, group)
    dist.barrier()
    flux_megatron.release(group)
    text = refused(errors.GroupBroken, lambda: check(call, group))
    assert "group 1 cannot be used any more, destroy it and make another: rank 0 failed" in text
    check(call, dist.new_group([0, 1]))


@on_device_ranks(2, environment=SHORT)
def test_the_first_error_is_reported(rank):
    """Rank 0 fails later, and differently."""
    x, w = torch.ones(6, 4, device=DEVICE), torch.ones(8, 4, device=DEVICE)
    store = dist.distributed_c10d._get_default_store()

    space = workspace(dist.group.WORLD, x.device)
    ops.all_gather_gemm(x, w, dist.group.WORLD)
    with pytest.raises(KeyError, match=f"of rank {rank}"):
        fail_in_a_call(
            space, KeyError(f"of rank {rank}"), lambda: rank or store.wait(["rank 1 has failed"])
        )
    if rank == 1:
        store.set("rank 1 has failed", "")
    dist.barrier()
    message = refused(errors.GroupBroken, lambda: check(Case("ag_gemm", 6, 8, 4)))
    assert "cannot be used any more before all its ranks call release(): rank 1 failed" in message
    assert message.endswith("rank 1 failed in the middle of a call: KeyError: 'of rank 1'")
    with pytest.raises(errors.GroupBroken):
        flux_megatron.confirm_step()
    check(Case("ag_gemm", 6, 8, 4), dist.new_group([0, 1]))  # another group is as it was
    flux_megatron.release()
    check(Case("ag_gemm", 6, 8, 4))


@pytest.mark.parametrize("entered_first", [False, True])
@on_device_ranks(2, environment=SHORT)
def test_a_missing_signal_is_explained_by_the_failure(rank, entered_first):
    """Rank 1 fails before its pushes: rank 0 learns why nothing comes, also where it has seen
    rank 1's entry in the log before rank 1 goes on.
    """
    x, w = torch.ones(6, 4, device=DEVICE), torch.ones(8, 4, device=DEVICE)
    group = dist.group.WORLD
    space = workspace(group, x.device)
    store = dist.PrefixStore(f"{entered_first}", dist.distributed_c10d._get_default_store())

    def done() -> None:
        ops.all_gather_gemm(x, w, group)
        flux_megatron.synchronize()

    done()
    if rank == 1:
        enter = space.log.break_off

        def enter_and_wait() -> None:
            enter()
            store.set("entered", "")
            store.wait(["found"])

        if entered_first:
            space.log.break_off = enter_and_wait
        with pytest.raises(ZeroDivisionError):
            fail_in_a_call(space, ZeroDivisionError("no wgrad today"))
        dist.barrier()
        message = refused(errors.GroupBroken, done)
    else:
        if entered_first:
            store.wait(["entered"])
        with pytest.raises((errors.SignalTimeout, errors.GroupBroken)) as caught:
            done()
        store.set("found", "")
        dist.barrier()
        message = str(caught.value)
    assert "rank 1 failed in the middle of a call: ZeroDivisionError: no wgrad today" in message


def too_large(*given: object) -> None:
    raise OutOfResources(245_760, 232_448, "shared memory")


@contextmanager
def no_gpu_that_holds_it() -> Iterator[None]:
    """As a first launch finds it: by Python, on GPUs too."""
    watched = mock.patch.object(calls, "is_watched", return_value=True)
    with watched, mock.patch.object(Launcher, "_launch", too_large), pytest.raises(OutOfResources):
        yield


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
        with no_gpu_that_holds_it():
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
    with captured, no_gpu_that_holds_it():
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
        with no_gpu_that_holds_it():
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


@on_device_ranks(2, environment=FUSED | {"FLUX_MEGATRON_TIMEOUT_S": "3"})
def test_after_one_wait_ran_out_of_time_no_other_waits(rank):
    """A host that does not look, as one that enqueues ahead of a GPU; rank 1 has gone."""
    group = dist.group.WORLD
    cases = Case("ag_gemm", 3, 5, 4), Case("gemm_rs", 3, 5, 4)
    for case in cases:
        check(case, group)
    x, w, six = (torch.ones(rows, 4, device=DEVICE) for rows in (3, 5, 6))
    if rank == 1:
        time.sleep(7)
        return
    started = time.monotonic()
    with mock.patch.object(Status, "late", return_value=""):
        for _ in range(6):
            ops.all_gather_gemm(x, w, group)
            ops.gemm_reduce_scatter(six, w, group)
    with pytest.raises(errors.SignalTimeout) as caught:
        flux_megatron.synchronize()
    assert 2.9 < time.monotonic() - started < 6.5, "twelve calls wait as long as one"
    first = str(caught.value)
    assert "rank 0 of group 0 waited 3 s for communication tile 0 of rank 1: epoch 2 exp" in first
    for case in cases:
        text = refused(errors.SignalTimeout, lambda case=case: check(case, group))
        assert text.partition(" (")[0] == first.partition(" (")[0], "only the first is reported"
