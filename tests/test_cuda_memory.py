"""Symmetric memory of GPUs, on a stand-in for the driver: who gets whose memory, whatever groups
made before; a rank that fails or does not come; and nothing is left behind.
"""

import gc
import os
import socket
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fake_cuda_memory import DEVICE, fake
from ranks import on_cpu_ranks

from flux_megatron import errors
from flux_megatron.kernels import launch
from flux_megatron.symm import copies, cuda_memory, descriptors

SIZE = cuda_memory.PAGE_BYTES
TIMEOUT = {"FLUX_MEGATRON_TIMEOUT_S": "1"}


def open_files() -> int:
    """Without those that garbage holds, of tests before this process was forked too."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def meet(group: dist.ProcessGroup, size_bytes: int = SIZE) -> None:
    """Every rank finds zeros, and then what every other has written for it."""
    buffer = cuda_memory.allocate(size_bytes, group, DEVICE)
    rank, world_size = group.rank(), group.size()
    assert buffer.size_bytes == -(-size_bytes // SIZE) * SIZE
    assert [one.data_ptr() for one in buffer.shards] == buffer.pointers.tolist()
    assert not buffer.shards[rank].any()
    dist.barrier(group)
    for other in range(world_size):
        buffer.shards[other][rank] = 10 * other + rank
    dist.barrier(group)
    assert buffer.shards[rank][:world_size].tolist() == [10 * rank + r for r in range(world_size)]
    dist.barrier(group)


@on_cpu_ranks(4)
def test_groups_that_made_a_different_number_meet_in_a_larger_one(rank):
    pairs, everybody = [dist.new_group([0, 1]), dist.new_group([2, 3])], dist.new_group()
    pair = pairs[rank // 2]
    with fake(str(rank)):
        for _ in range(1 + 2 * (rank // 2)):
            meet(pair)
        for group in (everybody, pair, everybody):
            meet(group, SIZE + 1)


@on_cpu_ranks(2)
def test_nothing_is_left_behind(rank):
    with fake(str(rank)) as driver:
        meet(dist.group.WORLD)
        files = open_files()
        for _ in range(3):
            buffer = cuda_memory.allocate(SIZE, dist.group.WORLD, DEVICE)
            assert len(driver.mapped) == 2
            del buffer
            gc.collect()
        assert (driver.handles, driver.mapped, driver.reserved) == (set(), {}, {})
        assert open_files() == files


@on_cpu_ranks(2)
def test_memory_that_torch_holds_and_nobody_uses_is_found(rank):
    """Rank 1's GPU is full of it; where nothing is found every rank learns that."""
    with fake(str(rank)) as driver:
        create, freed = driver.cuMemCreate, mock.Mock()

        def full(*given):
            return create(*given) if freed.called else ("CUDA_ERROR_OUT_OF_MEMORY", None)

        with mock.patch.object(torch.cuda, "empty_cache", freed):
            if rank == 1:
                driver.cuMemCreate = full
            meet(dist.group.WORLD)
            assert freed.call_count == rank
            driver.cuMemCreate = lambda *given: ("CUDA_ERROR_OUT_OF_MEMORY", None)
            with pytest.raises(errors.WorkspaceError, match=r"rank 0: .*OUT_OF_MEMORY"):
                meet(dist.group.WORLD)


def test_the_end_of_a_process_waits_for_no_gpu(monkeypatch):
    """In which a collective may never end."""
    waits = mock.Mock()
    monkeypatch.setattr(torch.cuda, "synchronize", waits)
    monkeypatch.setattr(cuda_memory, "_ending", False)
    cuda_memory.process_ends()
    cuda_memory._unmap(0, 4096, DEVICE)
    assert not waits.called


@pytest.mark.parametrize(
    ("others", "seen", "spare"),
    [(["b"], "abc", 0), (["b"], "a", copies.SMS), (["a"], "ab", copies.SMS), ([], "a", 0)],
    ids=["seen", "not seen", "shared", "alone"],
)
def test_copies_to_gpus_that_a_process_does_not_see_get_sms(monkeypatch, others, seen, spare):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(copies, "_made_by_sms", set())
    monkeypatch.setattr(launch, "sms", lambda device: 132)
    copies.note_peers(device, "a", others, seen)
    assert launch.persistent_grid(device, 1000) == (132 - spare,)
    assert launch.persistent_grid(device, 1000, spare_sms=8) == (124,)


@on_cpu_ranks(2)
def test_an_allocation_says_whose_gpus_are_not_seen(rank):
    with fake(str(rank)):
        cuda_memory.allocate(SIZE, dist.group.WORLD, DEVICE)
        assert copies.spare_sms(DEVICE) == copies.SMS
    assert copies.spare_sms(DEVICE) == 0


REFUSALS = [
    "cuMemCreate", "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle",
    "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess",
]  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
@on_cpu_ranks(2)
def test_every_rank_learns_what_the_driver_refuses_to_one(rank, name):
    files = open_files()
    said = f"symmetric memory of {SIZE} bytes: rank 1: {name} failed: CUDA_ERROR_REFUSED"
    with fake(str(rank), *[name] * rank) as driver:
        with pytest.raises(errors.WorkspaceError, match=f"^{said}$"):
            cuda_memory.allocate(SIZE, dist.group.WORLD, DEVICE)
        why = cuda_memory.why_not_shared(dist.group.WORLD, DEVICE)
        assert why == f"the GPUs share no memory: {said}"
        gc.collect()
        assert (driver.handles, driver.mapped, driver.reserved) == (set(), {}, {})
    with fake(str(rank)):
        assert cuda_memory.why_not_shared(dist.group.WORLD, DEVICE) is None
    assert open_files() == files


@on_cpu_ranks(3, environment=TIMEOUT)
def test_a_rank_whose_memory_does_not_come_is_named_on_every_rank(rank):
    """And nobody waits for it for ever."""
    if rank == 1:
        descriptors._post = lambda *given: None
    begin = time.monotonic()
    said = f"^symmetric memory of {SIZE} bytes: rank 0: no memory of rank 1 came within 1 s$"
    with fake(str(rank)), pytest.raises(errors.WorkspaceError, match=said):
        cuda_memory.allocate(SIZE, dist.group.WORLD, DEVICE)
    assert time.monotonic() - begin < 20


@on_cpu_ranks(2)
def test_what_strangers_post_is_not_taken(rank):
    post = descriptors._post
    theirs = os.memfd_create("of a stranger")
    os.ftruncate(theirs, SIZE)

    def with_strangers(name: str, word: str, descriptor: int, timeout_s: float) -> None:
        for wrong in ("", "\xff", f"{rank}/guessed"):
            post(name, wrong, theirs, timeout_s)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as nobody:
            nobody.connect(name)  # and says nothing
        post(name, word, descriptor, timeout_s)

    descriptors._post = with_strangers
    files = open_files()
    with fake(str(rank)):
        meet(dist.group.WORLD)
    assert open_files() == files


@pytest.mark.parametrize(("variable", "refused"), [(None, True), ("0", True), ("1", False)])
@on_cpu_ranks(2)
def test_ranks_share_a_gpu_only_where_they_are_told_to(rank, variable, refused):
    os.environ.pop(cuda_memory.SHARED_GPUS, None)
    if variable is not None:
        os.environ[cuda_memory.SHARED_GPUS] = variable
    with fake("the one"):
        why = cuda_memory.why_not_shared(dist.group.WORLD, DEVICE)
    assert ("several ranks share a GPU" in str(why)) == refused
