"""Symmetric memory: signals and epochs, the halves of a channel, growth, poison, any group."""

from __future__ import annotations

import inspect
import random
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import Case, call, check, operands
from closeness import assert_exact
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import DEVICE, FUSED, be_late, here, on_device, run_ranks

import flux_megatron
from flux_megatron import errors, ops
from flux_megatron.problem import Plan, Tile
from flux_megatron.symm import cpu_backend, objects, signals
from flux_megatron.symm import device as devices
from flux_megatron.symm import workspace as workspace_module
from flux_megatron.symm.buffer import SymmetricBuffer
from flux_megatron.symm.channel import Channel
from flux_megatron.symm.workspace import Workspace, _call_log, release, workspace, workspaces

PATTERNS = ("ag_gemm", "gemm_rs")
EPOCHS = st.integers(0, 2**34)


@given(EPOCHS, st.integers(0, 2**31 - 1))
def test_an_epoch_is_reached_by_itself_and_by_later_ones(epoch, later):
    assert signals.reached(signals.as_int32(epoch + later), signals.as_int32(epoch))


@given(EPOCHS, st.integers(1, 2**31))
def test_an_epoch_is_not_reached_by_earlier_ones(epoch, earlier):
    assert not signals.reached(signals.as_int32(epoch), signals.as_int32(epoch + earlier))


@given(st.integers(-(2**40), 2**40))
def test_epochs_are_written_as_int32(epoch):
    word = signals.as_int32(epoch)
    assert torch.tensor(word, dtype=torch.int32).item() == word
    assert (word - epoch) % 2**32 == 0


@given(st.integers(1, 10**7), st.integers(0, 10**7))
def test_communication_tiles_fit_their_slots(M_shard, wanted):
    rows = signals.comm_rows_at_least(M_shard, wanted)
    assert 1 <= rows <= M_shard
    assert -(-M_shard // rows) <= signals.MAX_COMM_TILES
    if wanted == 0:
        assert rows == M_shard
    elif M_shard <= wanted * signals.MAX_COMM_TILES:
        assert rows == min(wanted, M_shard)


@settings(max_examples=30)
@given(st.integers(1, 64))
def test_no_two_slots_are_the_same(world_size):
    tiles = range(signals.MAX_COMM_TILES)
    slots = [signals.slot(source, tile) for source in range(world_size) for tile in tiles]
    assert sorted(slots) == list(range(world_size * signals.MAX_COMM_TILES))


def objects_come_without_numpy(rank: int) -> None:
    group = dist.group.WORLD
    with mock.patch.object(torch.Tensor, "numpy", side_effect=RuntimeError("not available")):
        found = objects.all_gather({"rank": rank, "words": ["a"] * 10**rank}, group)
        leader = objects.broadcast(f"of {rank}" * (rank + 1), group)
    assert found == [{"rank": r, "words": ["a"] * 10**r} for r in range(group.size())]
    assert leader == "of 0"


@pytest.mark.parametrize("world_size", [1, 3])
def test_objects_among_ranks(world_size):
    run_ranks(objects_come_without_numpy, world_size)


def peers_see_each_other(rank: int) -> None:
    group = dist.group.WORLD
    memory = devices.allocate(1000, group, here())
    R = group.size()
    assert memory.size_bytes >= 1000
    assert all(not shard.any() for shard in memory.shards), "memory starts zeroed"
    assert memory.pointers.tolist() == [shard.data_ptr() for shard in memory.shards]
    dist.barrier()
    for peer in range(R):
        memory.view(peer, (R, 5), torch.float32, offset_bytes=40)[rank] = 10 * peer + rank
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    expected = 10 * rank + torch.arange(R).float().expand(5, R).t()
    assert_exact(memory.view(rank, (R, 5), torch.float32, offset_bytes=40), expected.contiguous())
    with pytest.raises(AssertionError, match=f"view ends at byte {memory.size_bytes + 4}"):
        memory.view(rank, (1,), torch.float32, offset_bytes=memory.size_bytes)


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_rank_reads_and_writes_every_shard(world_size):
    on_device(peers_see_each_other, world_size)


def one_cannot_map(rank: int) -> str:
    def denied(path: str, size_bytes: int) -> None:
        raise PermissionError(13, "denied", path)

    if rank == 1:
        cpu_backend._mapped = denied
    group = dist.group.WORLD
    assert _call_log(group, torch.device("cuda", 0)) is None  # GPUs do without
    with pytest.raises(errors.WorkspaceError) as raised:
        _call_log(group, torch.device("cpu"))
    return str(raised.value)


def test_a_rank_that_cannot_map_is_named_on_every_rank():
    for text in run_ranks(one_cannot_map, 2):
        assert "ranks cannot share memory: rank 1: [Errno 13] denied: '/proc/" in text


def channel_of(pattern: str) -> Channel:
    name = "gather" if pattern == "ag_gemm" else "scatter"
    return workspace(dist.group.WORLD, here()).channels[name]


def half_of(space: Workspace, rank: int, size_bytes: int) -> int:
    """Open and close one call; where its half lies on this rank."""
    opened = space.begin("gather", size_bytes)
    address = opened.view(rank, (1,), torch.uint8).data_ptr()
    space.end(opened)
    return address


def test_channels_are_made_when_calls_ask_for_them():
    assert on_device(channels_made, 2) == [[[], ["gather"], ["gather", "scatter"]]] * 2


def channels_made(rank: int) -> list[list[str]]:
    names = []
    for strategy, pattern in (
        ("sequential", "ag_gemm"),
        ("pipelined", "ag_gemm"),
        ("pipelined", "gemm_rs"),
    ):
        check(Case(pattern, 5, 4, 3, plan=Plan(strategy)))
        names.append([*workspace(dist.group.WORLD, here()).channels])
    return names


def halves(rank: int) -> None:
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


def test_calls_alternate_between_two_halves():
    on_device(halves, 2)


def grows(rank: int) -> None:
    """Small, large, small: the memory follows the largest call and stays."""
    sizes = []
    for M_shard in (5, 900, 5, 901, 4):
        for pattern in PATTERNS:
            check(Case(pattern, M_shard, 3, 2, plan=Plan("fused", tile=Tile(128, 16, 16))))
        sizes.append(flux_megatron.report().workspace_bytes)
    assert sizes[0] > 0
    assert sizes == sorted(sizes)
    assert sizes[1] >= 2 * 2 * 900 * 2 * 4, "two halves of two channels"
    assert sizes[2] == sizes[1]
    assert sizes[4] == sizes[3]
    assert len(workspaces()) == 1


def test_growth_between_calls():
    on_device(grows, 2)


def grows_together(rank: int) -> tuple[float, float]:
    """When this rank came to a call that needs more memory, and when it began to have it."""
    space, allocate, began = workspace(dist.group.WORLD, here()), devices.allocate, []

    def noting(*given: object) -> SymmetricBuffer:
        began.append(time.monotonic())
        return allocate(*given)

    half_of(space, rank, 5000)
    time.sleep(0.3 * rank)
    came = time.monotonic()
    with mock.patch.object(devices, "allocate", noting):
        half_of(space, rank, 10**6)
    return came, began[0]


def test_no_rank_grows_before_all_have_come():
    """Until then a rank may still use the memory that another one would give back."""
    came, began = zip(*on_device(grows_together, 2), strict=True)
    assert min(began) >= max(came)


def crosses(rank: int, pattern: str, strategy: str, start: int) -> None:
    """Every slot of the pads announces call `start`, as it would after that many calls."""
    case = Case(pattern, 20, 5, 4, plan=Plan(strategy, comm_rows=7, tile=Tile(16, 16, 16)))
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
        check(Case(**{**case.__dict__, "seed": seed}))
    assert channel.epoch == start + 8
    announced = channel._pads[rank][signals.slot(1 - rank, 0) :][:3].tolist()
    assert announced == [signals.as_int32(start + 8)] * 3


@pytest.mark.parametrize("strategy", ["fused", "pipelined"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_epochs_cross_the_wrap(pattern, strategy):
    for start in (2**31 - 4, 2**32 - 4):
        on_device(crosses, 2, pattern, strategy, start)


def reads_stale(rank: int) -> tuple[bool, bool, bool]:
    """What a reader finds in a buffer after the call that owned it: NaN, if poison is on."""
    x, w = (torch.ones(s, device=DEVICE) for s in ((6, 4), (5, 4)))
    gather = ops.start_gather(x, w, dist.group.WORLD)
    gathered = gather.complete()
    alive = bool((gathered == 1).all())
    gather.close()
    scatter = ops.start_gemm_rs(x, w, dist.group.WORLD)
    scatter.finish()
    return alive, bool(gathered.isnan().all()), bool(scatter.received.isnan().all())


@pytest.mark.parametrize("poison", ["1", "0"])
def test_poison_is_what_a_stale_read_finds(poison):
    environment = FUSED | {"FLUX_MEGATRON_POISON": poison}
    for alive, gathered, slots in on_device(reads_stale, 2, environment=environment):
        assert alive
        assert gathered == slots == (poison == "1")


def poisons_all_dtypes(rank: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, w = (torch.ones(s, dtype=dtype, device=DEVICE) for s in ((6, 4), (5, 4)))
        gather = ops.start_gather(x, w, dist.group.WORLD)
        gathered = gather.complete()
        gather.close()
        assert gathered.isnan().all(), dtype


def test_poison_is_nan_in_every_dtype():
    on_device(poisons_all_dtypes, 2, environment=FUSED)


def two_by_two(rank: int) -> list[int]:
    """TP 2 x DP 2: both pairs call at the same time with data of their own; then pairs across."""
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for seed in range(3):
        for groups, mine in ((rows, rank // 2), (columns, rank % 2)):
            if random.Random(f"{seed} {mine}").random() < 0.5:
                be_late(0.03)
            for pattern in PATTERNS:
                check(Case(pattern, 13 + mine, 7, 5, seed=100 * mine + seed), groups[mine])
    for pattern in PATTERNS:
        check(Case(pattern, 9, 7, 5))
    epochs = [space.channels["gather"].epoch for space in workspaces()]
    release()
    assert workspaces() == []
    return epochs


def test_subgroups_at_the_same_time():
    assert on_device(two_by_two, 4, environment=FUSED) == [[3, 3, 1]] * 4


def unordered(rank: int) -> int:
    """Ranks are ranks of the group: of 0, 1 and 2 rank 2 comes first."""
    group = dist.new_group([2, 0, 1], sort_ranks=False)
    for pattern in PATTERNS:
        check(Case(pattern, 13, 7, 5), group)
        check(Case(pattern, 13, 7, 5, plan=Plan("pipelined", comm_rows=5)), group)
    return group.rank()


@pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters,
    reason="this torch sorts the ranks of every group",
)
def test_a_group_in_another_order():
    assert on_device(unordered, 3, environment=FUSED) == [1, 2, 0]


def part_of_the_world(rank: int) -> None:
    """A group without rank 0, and with ranks that are not their numbers."""
    group = dist.new_group([1, 3])
    if rank in (1, 3):
        for pattern in PATTERNS:
            check(Case(pattern, 13, 7, 5), group)
    dist.barrier()


def test_a_group_that_is_part_of_the_world():
    on_device(part_of_the_world, 4, environment=FUSED)


def shared_ranks(rank: int) -> None:
    """Two groups over the same ranks have memory of their own, also with calls of both open."""
    first, second = dist.group.WORLD, dist.new_group([0, 1])
    x, w = (torch.full(s, 1.0 + rank, device=DEVICE) for s in ((6, 4), (5, 4)))
    scatters = [ops.start_gemm_rs(x * n, w, group) for n, group in ((1, first), (2, second))]
    for n, scatter in reversed([*enumerate(scatters, 1)]):
        assert_exact(scatter.finish(), torch.full((3, 5), 4.0 * n * (1 + 4)), f"group {n}")
    assert len(workspaces()) == 2


def test_two_groups_over_the_same_ranks():
    on_device(shared_ranks, 2, environment=FUSED)


def comes_back(rank: int) -> None:
    """Memory released and asked for again: the old answers and epochs are not those of the new."""
    for seed in range(3):
        check(Case("ag_gemm", 5, 4, 3, seed=seed))
        check(Case("gemm_rs", 5, 4, 3, seed=seed))
        release()
    assert flux_megatron.report().workspace_bytes == 0


def test_release_and_start_again():
    on_device(comes_back, 2, environment=FUSED)


def two_in_flight(rank: int) -> None:
    """A gather and a scatter of one group are open at once, as in a column layer's backward."""
    group = dist.group.WORLD
    for seed in range(4):
        if rank == seed % 2:
            be_late(0.02)
        given = operands(Case("gemm_rs", 7, 5, 3, seed=seed), 2)
        x = torch.full((4, 3), float(10 * seed + rank), device=DEVICE)
        gather = ops.start_gather(x, torch.ones(2, 3, device=DEVICE), group)
        y = call(Case("gemm_rs", 7, 5, 3, seed=seed), given, group)
        expected = torch.tensor([10.0 * seed, 10.0 * seed + 1]).repeat_interleave(4)
        assert_exact(gather.complete(), expected[:, None].expand(8, 3))
        gather.close()
        assert_exact(y, given.expected[rank])


def test_both_directions_in_flight():
    on_device(two_in_flight, 2, environment=FUSED)


def wrong_order(rank: int) -> None:
    space = workspace(dist.group.WORLD, here())
    opened = space.begin("gather", 100)
    with pytest.raises(errors.WorkspaceError, match="while another was open"):
        space.begin("gather", 10**6)
    space.end(opened)
    with pytest.raises(AssertionError, match="closed in order"):
        space.end(opened)


def test_a_channel_has_one_open_call():
    on_device(wrong_order, 1)


def captures(rank: int) -> None:
    """Captured calls share a region and an epoch; memory can only be had before."""
    space = workspace(dist.group.WORLD, here())
    eager = [half_of(space, rank, 5000) for _ in range(2)]
    with mock.patch.object(workspace_module, "capturing", return_value=True):
        captured = [half_of(space, rank, 5000) for _ in range(3)]
        for name in ("gather", "scatter"):
            with pytest.raises(errors.WorkspaceError, match="make the same call once before"):
                space.begin(name, 10**6)
        call = space.begin("gather", 5000)
        space.end(call)
    assert len({*captured, *eager}) == 3
    assert call.epoch == signals.CAPTURED_EPOCH
    assert call.region.entries is not None, "it begins with a rank barrier"
    channel = space.channels["gather"]
    assert channel.epoch == 2
    held = channel.size_bytes
    half_of(space, rank, 10**6)
    assert channel.size_bytes >= held + 3 * 10**6, "graphs need the memory that they know"
    held = channel.size_bytes
    half_of(space, rank, 2 * 10**6)
    assert held < channel.size_bytes < held + 4 * 10**6, "nothing was captured in the second memory"


def test_captured_calls_have_a_part_of_their_own():
    on_device(captures, 2)


def late_entry(rank: int) -> str:
    """Rank 1 does not come to a captured call."""
    check(Case("gemm_rs", 5, 4, 3))
    if rank == 1:
        return ""
    with (
        mock.patch.object(workspace_module, "capturing", return_value=True),
        pytest.raises(errors.SignalTimeout) as raised,
    ):
        check(Case("gemm_rs", 5, 4, 3))
    return str(raised.value)


@pytest.mark.skipif(DEVICE == "cuda", reason="a call that only seems captured runs at once on CPU")
def test_a_rank_that_does_not_come_to_a_captured_call_is_named():
    message, _ = on_device(late_entry, 2, environment={"FLUX_MEGATRON_TIMEOUT_S": "1"})
    assert (
        "waited 1 s for rank 1 to begin the same captured call: epoch 1 expected, 0 seen" in message
    )


def test_what_a_slot_announces_is_described():
    assert signals.describe_slot(signals.slot(2, 5), 3) == "communication tile 5 of rank 2"
    assert (
        signals.describe_slot(signals.entry_slot(2, 3), 3)
        == "rank 2 to begin the same captured call"
    )
