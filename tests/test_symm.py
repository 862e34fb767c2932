"""Symmetric memory: signals and slots, what ranks see of each other, of any process group and of
several at once, and GPUs that share none.
"""

import inspect
import os
import random
import warnings
from unittest import mock
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from cases import Case, check
from closeness import assert_exact
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import DEVICE, FUSED, be_late, here, on_cpu_ranks, on_device_ranks

import flux_megatron
from flux_megatron import errors, pieces
from flux_megatron.nn import functions
from flux_megatron.overlap.report import report
from flux_megatron.problem import Plan
from flux_megatron.symm import cpu_backend, objects, signals, workspace
from flux_megatron.symm import device as devices
from flux_megatron.symm.call_log import call_log
from flux_megatron.symm.places import Missing
from flux_megatron.symm.workspaces import release, workspaces


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
    assert call_log(group, torch.device("cuda", 0)) is None  # GPUs do without
    said = r"ranks cannot share memory: rank 1: \[Errno 13\] denied: '/proc/"
    with pytest.raises(errors.WorkspaceError, match=said):
        call_log(group, torch.device("cpu"))


@on_cpu_ranks(2)
def test_a_rank_without_a_descriptor_is_named_on_every_rank(rank):
    none_left = {"side_effect": OSError("Too many open files")} if rank else {}
    makes = mock.patch.object(os, "memfd_create", wraps=os.memfd_create, **none_left)
    said = "ranks cannot share memory: .*rank 1: 4096 bytes of shared memory: Too many open files"
    with makes, pytest.raises(errors.WorkspaceError, match=said):
        cpu_backend.allocate(4096, dist.group.WORLD)


def test_what_a_slot_announces_is_described():
    of_tile, of_entry = signals.slot(2, 5), signals.entry_slot(2, 3)
    assert signals.describe_slot(of_tile, 3) == "communication tile 5 of rank 2"
    assert signals.describe_slot(of_entry, 3) == "rank 2 to begin the same captured call"


PATTERNS = ("ag_gemm", "gemm_rs")


@on_device_ranks(4, environment=FUSED)
def test_subgroups_at_the_same_time(rank):
    """TP 2 x DP 2: both pairs call at the same time with data of their own; then pairs across."""
    pairs = ([0, 1], [2, 3]), ([0, 2], [1, 3])
    rows, columns = ([dist.new_group(ranks) for ranks in both] for both in pairs)
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
    assert epochs == [3, 3, 1]


@pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters,
    reason="this torch sorts the ranks of every group",
)
@on_device_ranks(3, environment=FUSED)
def test_a_group_in_another_order(rank):
    """Ranks are ranks of the group: of 0, 1 and 2 rank 2 comes first."""
    group = dist.new_group([2, 0, 1], sort_ranks=False)
    for pattern in PATTERNS:
        check(Case(pattern, 13, 7, 5), group)
        check(Case(pattern, 13, 7, 5, plan=Plan("pipelined", comm_rows=5)), group)
    assert group.rank() == (1, 2, 0)[rank]


@on_device_ranks(2, environment=FUSED)
def test_two_groups_over_the_same_ranks(rank):
    first, second = dist.group.WORLD, dist.new_group([0, 1])
    x, w = (torch.full(s, 1.0 + rank, device=DEVICE) for s in ((6, 4), (5, 4)))
    scatters = [pieces.start_gemm_rs(x * n, w, group) for n, group in ((1, first), (2, second))]
    for n, scatter in reversed([*enumerate(scatters, 1)]):
        assert_exact(scatter.finish(), torch.full((3, 5), 4.0 * n * (1 + 4)), f"group {n}")
    assert len(workspaces()) == 2


@on_device_ranks(2, environment=FUSED)
def test_release_and_start_again(rank):
    """Memory released and asked for again: the old answers and epochs are not those of the new."""
    for seed in range(3):
        for pattern in PATTERNS:
            check(Case(pattern, 5, 4, 3, seed=seed))
        release()
    assert flux_megatron.report().workspace_bytes == 0


X, W = torch.ones(4, 4), torch.ones(4, 4)
COUNTS = torch.ones(1, 1, dtype=torch.int32)
BAGS = torch.zeros(2, dtype=torch.int64), torch.tensor([0, 1, 2])
CALLS = {
    "all_gather_gemm": ((X, W), {}),
    "all_gather_gemm, with gradients": ((X.clone().requires_grad_(), W), {}),
    "gemm_reduce_scatter": ((X, W), {}),
    "gemm_all_reduce": ((X, W), {}),
    "gemv_all_reduce": ((X, W), {}),
    "gemv_all_reduce, many rows": ((torch.ones(99, 4), W), {}),
    "a2a_gemm": ((X, W[None], COUNTS), {"capacity": 4}),
    "gemm_a2a": ((X, W[None], COUNTS), {"tokens": 4}),
    "embedding_all_to_all": ((W[None], *BAGS), {}),
    "column_parallel_linear": ((X, W, None), {}),
    "row_parallel_linear": ((X, W), {}),
    "row_linear": ((X, W), {}),  # it would return this rank's share for the sum
}


@pytest.mark.parametrize("name", CALLS)
def test_none_is_no_group(name):
    given, options = CALLS[name]
    module = functions if "linear" in name else flux_megatron
    with pytest.raises(ValueError, match=r"^group None given, the process group of the ranks"):
        getattr(module, name.partition(",")[0])(*given, group=None, **options)


def test_objects_travel_on_the_gpu_that_the_group_is_bound_to():
    cpu, cuda, gpu = torch.device("cpu"), torch.device("cuda"), torch.device("cuda", 3)
    for bound, kinds, found in ((gpu, [cuda], gpu), (None, [cuda], cuda), (gpu, [cuda, cpu], cpu)):
        assert objects._device(Mock(bound_device_id=bound, _device_types=kinds)) == found


@on_cpu_ranks(2, environment=FUSED)
def test_calls_fall_back_where_gpus_share_no_memory(rank):
    workspace.missing = lambda group, device: Missing("the GPUs share no memory: rank 0: closed")
    check(Case("ag_gemm", 4, 4, 4))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "flux_megatron")  # it has been said
        check(Case("ag_gemm", 4, 4, 4, seed=1))
    assert report().calls == {("ag_gemm", "sequential"): 2}
    assert report().fallbacks == {("ag_gemm", "the GPUs share no memory: rank 0: closed"): 2}
