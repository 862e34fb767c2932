"""Symmetric memory: signals, epochs and slots, and what ranks see of each other."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from closeness import assert_exact
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import DEVICE, here, on_cpu_ranks, on_device_ranks

from flux_megatron import errors
from flux_megatron.symm import cpu_backend, objects, signals
from flux_megatron.symm import device as devices
from flux_megatron.symm.workspace import _call_log


@given(st.integers(0, 2**34), st.integers(-(2**31), 2**31 - 1))
def test_an_epoch_is_reached_by_itself_and_by_later_ones_alone(epoch, later):
    seen = signals.as_int32(epoch + later)
    assert signals.reached(seen, signals.as_int32(epoch)) == (later >= 0)


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


@pytest.mark.parametrize("world_size", [1, 3])
@on_cpu_ranks("world_size")
def test_objects_among_ranks(rank):
    group = dist.group.WORLD
    with mock.patch.object(torch.Tensor, "numpy", side_effect=RuntimeError("not available")):
        found = objects.all_gather({"rank": rank, "words": ["a"] * 10**rank}, group)
        leader = objects.broadcast(f"of {rank}" * (rank + 1), group)
    assert found == [{"rank": r, "words": ["a"] * 10**r} for r in range(group.size())]
    assert leader == "of 0"


@pytest.mark.parametrize("world_size", [1, 3])
@on_device_ranks("world_size")
def test_every_rank_reads_and_writes_every_shard(rank):
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


@on_cpu_ranks(2)
def test_a_rank_that_cannot_map_is_named_on_every_rank(rank):
    def denied(path: str, size_bytes: int) -> None:
        raise PermissionError(13, "denied", path)

    if rank == 1:
        cpu_backend._mapped = denied
    group = dist.group.WORLD
    assert _call_log(group, torch.device("cuda", 0)) is None  # GPUs do without
    with pytest.raises(errors.WorkspaceError) as raised:
        _call_log(group, torch.device("cpu"))
    text = str(raised.value)
    assert "ranks cannot share memory: rank 1: [Errno 13] denied: '/proc/" in text


def test_what_a_slot_announces_is_described():
    assert signals.describe_slot(signals.slot(2, 5), 3) == "communication tile 5 of rank 2"
    assert (
        signals.describe_slot(signals.entry_slot(2, 3), 3)
        == "rank 2 to begin the same captured call"
    )
