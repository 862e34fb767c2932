"""The halves of a channel, its growth and poison, calls that are open at once and captured ones."""

from __future__ import annotations

import time
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import Case, check, plan_of
from ranks import DEVICE, FUSED, be_late, here, on_device_ranks

from flux_megatron import errors, pieces
from flux_megatron.problem import Plan, Tile
from flux_megatron.symm import device as devices
from flux_megatron.symm import signals
from flux_megatron.symm import workspace as workspace_module
from flux_megatron.symm.buffer import SymmetricBuffer
from flux_megatron.symm.channel import Channel
from flux_megatron.symm.workspace import Workspace
from flux_megatron.symm.workspaces import workspace


def channel_of(pattern: str) -> Channel:
    name = "gather" if pattern == "ag_gemm" else "scatter"
    return workspace(dist.group.WORLD, here()).channels[name]


def half_of(space: Workspace, rank: int, size_bytes: int) -> int:
    """Open and close one call; where its half lies on this rank."""
    opened = space.begin("gather", size_bytes)
    address = opened.region.view(rank, (1,), torch.uint8).data_ptr()
    space.end(opened)
    return address


@on_device_ranks(2)
def test_channels_are_made_when_calls_ask_for_them(rank):
    names = []
    for kind in ("sequential ag_gemm", "pipelined ag_gemm", "pipelined gemm_rs"):
        strategy, pattern = kind.split()
        check(Case(pattern, 5, 4, 3, plan=Plan(strategy)))
        names.append([*workspace(dist.group.WORLD, here()).channels])
    assert names == [[], ["gather"], ["gather", "scatter"]]


@on_device_ranks(2)
def test_calls_alternate_between_two_halves(rank):
    space = workspace(dist.group.WORLD, here())
    places = [half_of(space, rank, 5000) for _ in range(4)]
    channel = space.channels["gather"]
    assert places[0] == places[2]
    assert places[1] == places[3]
    assert abs(places[0] - places[1]) >= 5000
    assert channel.epoch == 4
    size = channel.size_bytes
    assert size >= 10000
    half_of(space, rank, 100)
    assert channel.size_bytes == size
    half_of(space, rank, 3 * 10**6)
    assert channel.size_bytes >= 6 * 10**6


@on_device_ranks(2)
def test_no_rank_grows_before_all_have_come(rank):
    """Until then a rank may still use the memory that another one would give back."""
    space, allocate, began = workspace(dist.group.WORLD, here()), devices.allocate, []

    def noting(*given: object) -> SymmetricBuffer:
        began.append(time.monotonic())
        return allocate(*given)

    half_of(space, rank, 5000)
    time.sleep(0.3 * rank)
    came = time.monotonic()
    with mock.patch.object(devices, "allocate", noting):
        half_of(space, rank, 10**6)
    times = [None] * 2
    dist.all_gather_object(times, (came, began[0]))
    all_came, all_began = zip(*times, strict=True)
    assert min(all_began) >= max(all_came)


@pytest.mark.parametrize(
    ("start", "pattern", "strategy"),
    [(2**31 - 4, "ag_gemm", "fused"), (2**31 - 4, "gemm_rs", "pipelined"),
     (2**32 - 4, "ag_gemm", "pipelined"), (2**32 - 4, "gemm_rs", "fused")],
)  # fmt: skip
@on_device_ranks(2)
def test_epochs_cross_the_wrap(rank, pattern, strategy, start):
    """Every slot of the pads announces call `start`, as it would after that many calls."""
    case = Case(pattern, 20, 5, 4, plan=plan_of(strategy, comm_rows=7, tile=Tile(16, 16, 16)))
    check(case)
    channel = channel_of(pattern)
    dist.barrier()
    channel._pads[rank].fill_(signals.as_int32(start))
    channel.epoch = start
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    for seed in range(8):
        if rank == seed % 2:
            be_late(0.02)
        check(replace(case, seed=seed))
    assert channel.epoch == start + 8
    announced = channel._pads[rank][signals.slot(1 - rank, 0) :][:3].tolist()
    assert announced == [signals.as_int32(start + 8)] * 3


@pytest.mark.parametrize("poison", ["1", "0"])
@on_device_ranks(2, environment=FUSED | {"FLUX_MEGATRON_POISON": "{poison}"})
def test_poison_is_what_a_stale_read_finds(rank, poison):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, w = (torch.ones(s, dtype=dtype, device=DEVICE) for s in ((6, 4), (5, 4)))
        gather = pieces.start_gather(x, w, dist.group.WORLD)
        gathered = gather.complete()
        assert (gathered == 1).all()
        gather.close()
        scatter = pieces.start_gemm_rs(x, w, dist.group.WORLD)
        scatter.finish()
        (in_flight,) = scatter.calls
        received = in_flight.region.view(rank, (2, 3, 5), x.dtype)
        assert gathered.isnan().all() == received.isnan().all() == (poison == "1")


@on_device_ranks(1)
def test_a_channel_has_one_open_call(rank):
    space = workspace(dist.group.WORLD, here())
    opened = space.begin("gather", 100)
    with pytest.raises(errors.WorkspaceError, match="while another was open"):
        space.begin("gather", 10**6)
    space.end(opened)
    with pytest.raises(AssertionError, match="closed once"):
        space.end(opened)


@on_device_ranks(2)
def test_captured_calls_have_a_part_of_their_own(rank):
    space = workspace(dist.group.WORLD, here())
    eager = [half_of(space, rank, 5000) for _ in range(2)]
    channel = space.channels["gather"]
    before = channel.size_bytes
    with mock.patch.object(workspace_module, "capturing", return_value=True):
        captured = [half_of(space, rank, 5000) for _ in range(3)]
        for name in ("gather", "scatter"):
            with pytest.raises(errors.WorkspaceError, match="make the same call once before"):
                space.begin(name, 10**6)
        call = space.begin("gather", 5000)
        space.end(call)
    assert {*captured} < {*eager}, "a capture cannot allocate"
    assert channel.size_bytes == before
    assert call.epoch == signals.CAPTURED_EPOCH
    assert call.region.entries is not None, "it begins with a rank barrier"
    later = [half_of(space, rank, 5000) for _ in range(4)]
    assert later[:2] == later[2:]
    assert len({*later, *captured}) == 3
    assert {*eager} - {*captured} < {*later}, "only what captured calls have taken is replaced"
    assert channel.epoch == 6
    with mock.patch.object(workspace_module, "capturing", return_value=True):
        assert half_of(space, rank, 5000) == captured[0]
    held = channel.size_bytes
    half_of(space, rank, 10**6)
    assert channel.size_bytes >= before + 2 * 10**6, "graphs need the memory that they know"
    assert channel.size_bytes < held + 3 * 10**6, "nothing was captured in the new memory"


@pytest.mark.skipif(DEVICE == "cuda", reason="a call that only seems captured runs at once on CPU")
@on_device_ranks(2, environment={"FLUX_MEGATRON_TIMEOUT_S": "1"})
def test_a_rank_that_does_not_come_to_a_captured_call_is_named(rank):
    check(Case("gemm_rs", 5, 4, 3))
    if rank == 1:
        return
    with (
        mock.patch.object(workspace_module, "capturing", return_value=True),
        pytest.raises(errors.SignalTimeout) as raised,
    ):
        check(Case("gemm_rs", 5, 4, 3))
    said = "waited 1 s for rank 1 to begin the same captured call: epoch 1 expected, 0 seen"
    assert said in str(raised.value)
