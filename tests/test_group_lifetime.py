"""What a group holds ends with it, and how long its ranks wait is what the group says."""

from __future__ import annotations

import datetime
import os
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import Case, check, fail_in_a_call, plan_of
from ranks import DEVICE, here, on_cpu_ranks, on_device_ranks
from started import python
from test_failed_groups import wait_in_vain

import flux_megatron
from flux_megatron import errors, ops, pieces, settings
from flux_megatron.expert_parallel.ops import a2a_gemm
from flux_megatron.kernels.triton_launch import Launcher
from flux_megatron.overlap import calls, collectives, signalled
from flux_megatron.overlap import stage as stages
from flux_megatron.overlap.gather import add_gather, gather_rows
from flux_megatron.problem import Plan, Tile
from flux_megatron.symm import call_log, groups
from flux_megatron.symm import workspaces as workspaces_module
from flux_megatron.symm.agreement import Agreement
from flux_megatron.symm.channel import Channel
from flux_megatron.symm.device import communication_stream, copy_engine
from flux_megatron.symm.program import CallProgram
from flux_megatron.symm.word_channel import WordChannel
from flux_megatron.symm.workspaces import workspace, workspaces
from flux_megatron.tuning import choice

PIPELINED = {"FLUX_MEGATRON_STRATEGY": "pipelined"}
GATHER, SCATTER = Case("ag_gemm", 6, 8, 4), Case("gemm_rs", 5, 7, 3)


@on_device_ranks(2, environment=PIPELINED)
def test_a_destroyed_group_keeps_no_symmetric_memory(rank):
    held = []
    for _ in range(4):
        group = dist.new_group([0, 1])
        check(GATHER, group)
        check(SCATTER, group)
        held.append((len(workspaces()), sum(space.size_bytes for space in workspaces())))
        dist.destroy_process_group(group)
    assert held[0][0] == 1
    assert held == held[:1] * 4


@pytest.mark.parametrize("strategy", ["pipelined", "signalled"])
@on_device_ranks(2, environment={"FLUX_MEGATRON_STRATEGY": "{strategy}"})
def test_memory_is_released_on_request_and_taken_again(rank):
    group, other = dist.group.WORLD, dist.new_group([0, 1])
    for one in (group, other):
        check(GATHER, one)
    space = workspace(group, here())
    flux_megatron.release(group)
    assert [one.group for one in workspaces()] == [other]
    assert (space.size_bytes, space.channels, space.checked) == (0, {}, {})
    check(GATHER, group)  # takes memory again
    assert workspace(group, here()) is not space
    flux_megatron.release()
    assert workspaces() == []
    flux_megatron.release(group)  # has none: nothing to do
    check(GATHER, other)


@pytest.mark.parametrize("strategy", ["fused", "signalled"])
@on_device_ranks(2, environment={"FLUX_MEGATRON_STRATEGY": "{strategy}"})
def test_experts_take_memory_again_after_a_release(rank):
    group = dist.group.WORLD
    x, w = torch.ones(6, 8, device=here()), torch.ones(1, 4, 8, device=here())
    counts = torch.full((2, 1), 3, dtype=torch.int32, device=here())
    for _ in range(2):
        y, _ = a2a_gemm(x, w, counts, group, capacity=6)
        assert torch.equal(y, torch.full_like(y, 8))
        space = workspace(group, here())
        assert space.channels or space.stage
        flux_megatron.release()
        assert (space.channels, space.stage) == ({}, None)


@on_device_ranks(2)
def test_plans_outlive_a_release_and_are_not_asked_for_again(rank):
    group = dist.group.WORLD
    check(GATHER)
    before = dict(workspace(group, here()).agreed)
    flux_megatron.release()
    space = workspace(group, here())
    assert space.agreed == before != {}
    with mock.patch.object(Agreement, "ask", side_effect=AssertionError("asked")):
        ((kind, plan, _),) = before
        assert choice.agreed_table(kind, plan, space) is next(iter(before.values()))
    flux_megatron.release()
    if rank == 1:  # as after a failure that rank 0 has not seen
        workspaces_module._agreed_before.clear()
    check(GATHER)
    assert workspace(group, here()).agreed.keys() == before.keys()


@on_device_ranks(2, environment=PIPELINED)
def test_memory_of_a_call_in_flight_is_not_released(rank):
    group, other = dist.group.WORLD, dist.new_group([0, 1])
    check(GATHER, other)
    check(GATHER)
    space = workspace(group, here())
    call = space.begin("gather", 100)
    with pytest.raises(errors.WorkspaceError, match=r"release: .* held: a call is in flight"):
        flux_megatron.release()
    assert {one.group for one in workspaces()} == {group, other}  # all or none
    flux_megatron.release(other)
    space.end(call)
    flux_megatron.release()
    assert workspaces() == []
    check(GATHER)
    with pytest.raises(ZeroDivisionError):
        fail_in_a_call(workspace(group, here()), ZeroDivisionError())
    dist.barrier()
    flux_megatron.release()  # that call never ends
    check(GATHER)


def assert_a_graph_holds_memory() -> None:
    space = workspace(dist.group.WORLD, here())
    held = space.size_bytes
    with pytest.raises(errors.WorkspaceError, match=r"a captured CUDA graph .* graphs_dropped=T"):
        flux_megatron.release()
    assert space.size_bytes == held
    flux_megatron.release(graphs_dropped=True)
    assert space.size_bytes == 0


@pytest.mark.parametrize("outgrown", [False, True])
@pytest.mark.parametrize(("name", "kind"), [("gather", Channel), ("words", WordChannel)])
@on_device_ranks(2, environment=PIPELINED)
def test_memory_that_a_graph_holds_is_not_released(rank, name, kind, outgrown):
    space = workspace(dist.group.WORLD, here())
    space.end(space.begin(name, 4096, kind))
    channel = space.channels[name]
    larger = 4 * channel.region_bytes
    channel.end(channel.begin(captured=True))
    if outgrown:
        space.end(space.begin(name, larger, kind))
    with (
        mock.patch.object(workspaces_module, "capturing", return_value=True),
        pytest.raises(errors.WorkspaceError, match="a CUDA graph is being captured"),
    ):
        flux_megatron.release(graphs_dropped=True)
    assert_a_graph_holds_memory()
    check(GATHER)


@on_device_ranks(2, environment={"FLUX_MEGATRON_STRATEGY": "signalled"})
def test_tables_of_bands_that_a_graph_holds_are_not_released(rank):
    check(Case("gemm_rs", 8, 16, 16))
    with mock.patch.object(signalled, "capturing", return_value=True):
        check(Case("gemm_rs", 8, 16, 16))
    assert_a_graph_holds_memory()


@on_device_ranks(2, environment=PIPELINED | {"FLUX_MEGATRON_TIMEOUT_S": "2"})
def test_a_group_that_is_broken_works_again_when_its_memory_is_released(rank):
    """What its ranks agreed on before they agree on anew: a rank may have failed in the middle."""
    check(SCATTER)
    before = dict(workspace(dist.group.WORLD, here()).agreed)
    wait_in_vain(rank, dist.group.WORLD)
    if rank == 1:  # which learns it
        with pytest.raises(errors.GroupBroken):
            workspace(dist.group.WORLD, here()).ask()
    flux_megatron.release()
    check(SCATTER)
    after = workspace(dist.group.WORLD, here()).agreed
    assert after.keys() == before.keys()
    assert not any(after[key] is before[key] for key in before)


@on_cpu_ranks(2)
def test_a_wait_is_bounded_by_the_groups_timeout_unless_the_variable_says_otherwise(rank):
    del os.environ["FLUX_MEGATRON_TIMEOUT_S"]
    settings.reload()
    minutes = dist.new_group([0, 1], timeout=datetime.timedelta(minutes=50))
    assert groups.timeout_s(minutes) == 2400.0
    never = dist.new_group([0, 1], timeout=datetime.timedelta(days=10**6))
    assert groups.timeout_s(never) == 1e9
    with mock.patch.dict("os.environ", FLUX_MEGATRON_TIMEOUT_S="7.5"):
        settings.reload()
        assert groups.timeout_s(minutes) == 7.5
    settings.reload()
    short = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=8))
    workspace(short, here())
    began = time.monotonic()
    if rank:  # makes no call
        time.sleep(9)
        return
    with pytest.raises(errors.FluxError, match=r"no answer|different calls"):
        check(GATHER, short)
    assert 5 < time.monotonic() - began < 12, "6.4 of 8 s"


@on_device_ranks(2, environment=PIPELINED)
def test_who_asks_a_rank_that_fails_is_answered_at_once(rank):
    """Rank 0 asks about a call that is new while rank 1 fails in the middle of another."""
    check(GATHER)  # there is a channel
    space = workspace(dist.group.WORLD, here())

    dist.barrier()
    began = time.monotonic()
    if rank:
        time.sleep(0.5)  # the other asks by now
        with pytest.raises(ZeroDivisionError):
            fail_in_a_call(space, ZeroDivisionError())
    else:
        with pytest.raises(errors.GroupBroken, match="rank 1 failed in the middle of a call"):
            space.agreement.ask("a new call", "")
    assert time.monotonic() - began < 5, "not after the 20 s that a wait may take"


class Looked(list):
    """A ring that the doorbell's thread looks at whenever the caller's is about to store."""

    log: call_log.CallLog

    def __setitem__(self, place, entry):
        self.log.difference()
        super().__setitem__(place, entry)


def test_a_look_between_two_stores_loses_no_mismatch():
    rings = [Looked([0] * call_log.ENTRIES) for _ in range(2)]
    mine, others = (call_log.CallLog.__new__(call_log.CallLog) for _ in range(2))
    for rank, log in enumerate((mine, others)):
        log._rank, log._rings, log._digests, log._count = rank, rings, {}, 0
        log._others, log._compared = [(1 - rank, rings[1 - rank])], [0, 0]
        rings[rank].log = log
    for log in (others, mine):
        log.note("the same")
    others._write("another call")
    with pytest.raises(errors.ProblemMismatch, match="call 2 of rank 0 is the same"):
        mine.note("the same")


@on_cpu_ranks(2)
def test_no_call_ends_before_all_its_signals_are_awaited(rank):
    """Of a gather whose rows nobody asks for: else a rank two calls ahead would overwrite rows that
    are still on their way.
    """
    x = torch.full((4, 8), float(rank), device=DEVICE)
    space, waited = workspace(dist.group.WORLD, here()), []
    gather = calls.start_gather(gather_rows, x, Plan("fused"), space)
    launch = Launcher.launch

    def launched(launcher: Launcher, *given: object) -> None:
        waited.append(launcher.name)
        launch(launcher, *given)

    with mock.patch.object(Launcher, "launch", launched):
        gather.close()
    dist.barrier()
    assert waited == ["wait_sources"]


def test_a_program_cannot_end_before_all_signals_are_awaited():
    space = SimpleNamespace(rank=0, world_size=3, timeout_ns=1, mailboxes=False)
    program = CallProgram(
        space, Plan("fused"), torch.zeros(4, 8), None, None, "", caller_steps=True
    )
    gather = add_gather(program, program.x, 0)
    gather.wait_for(1)
    with pytest.raises(AssertionError, match="not all rows are awaited"):
        gather.close()
    gather.wait_for(2)
    gather.close()


@pytest.mark.parametrize(
    ("strategy", "wanted"),
    [("pipelined", ["join", "[8, 3]"]), ("signalled", ["join", "[4, 3]", "[8, 3]"])],
)
@on_cpu_ranks(2)
def test_what_pushes_read_is_held_until_the_finishing_stream_has_joined(rank, strategy, wanted):
    """What `finish` keeps from other streams, by its address."""
    plan = plan_of(strategy, tile=Tile(16, 16, 16))
    engine, order = copy_engine(here()), []

    def joins(*_: object) -> None:
        order.append("join")

    def holds(*tensors: torch.Tensor) -> None:
        order.extend(str(list(one.shape)) for one in tensors)

    with (
        mock.patch.object(engine, "join", joins),
        mock.patch.object(engine, "hold", holds),
        mock.patch.object(communication_stream(here()), "join", joins),
    ):
        x, w = torch.ones(8, 4), torch.ones(3, 4)
        pieces.start_gemm_rs(x, w, dist.group.WORLD, plan=plan).finish()
    assert order == wanted


@on_cpu_ranks(2)
def test_a_failed_call_of_signalled_joins_its_stream(rank):
    """The collective of a band fails: the communication stream has its kernel's counts to await."""
    x, w = torch.ones(8, 4), torch.ones(3, 4)
    plan = Plan("signalled", tile=Tile(16, 16, 16))
    with (
        mock.patch.object(collectives, "wait", side_effect=RuntimeError("no network")),
        mock.patch.object(stages.Stage, "join", autospec=True) as joined,
        pytest.raises(RuntimeError, match="no network"),
    ):
        ops.gemm_reduce_scatter(x, w, dist.group.WORLD, plan=plan)
    assert joined.called


FAKE = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
import flux_megatron
from flux_megatron.nn import ColumnParallelLinear, RowParallelLinear
group = dist.group.WORLD
x = torch.randn(4, 16, requires_grad=True)
y = RowParallelLinear(24, 16, group=group)(ColumnParallelLinear(16, 24, group=group)(x))
y.sum().backward()
print(list(y.shape), list(x.grad.shape), flux_megatron.report().fallbacks)
"""
# Gloo's threads abort the process when they drop a tensor at its end: 8 of 25 short runs did.
DESTROYED = """
import atexit, os, weakref

held = []
atexit.register(lambda: print("group", "gone" if held[0]() is None else "held"))  # runs last

import torch
import torch.distributed as dist
from flux_megatron.symm.workspaces import workspace

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
held.append(weakref.ref(dist.group.WORLD))
workspace(dist.group.WORLD, torch.device("cpu"))
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("program", "said"),
    [(FAKE, "[4, 16] [4, 16]"), (DESTROYED, "group gone\n")],
    ids=["the backend `fake`", "no workspace keeps a destroyed group into the interpreter's end"],
)
def test_a_program_runs_through(program, said):
    done = python("-c", program, FLUX_MEGATRON_STRATEGY="auto")
    assert done.stdout.startswith(said)
