"""What a process keeps does not grow with the number of different shapes: caches, symmetric memory
and decisions. A growth of a channel is agreed on, and frees the memory before it.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import plan_of
from hypothesis import given
from hypothesis import strategies as st
from ranks import DEVICE, here, on_cpu_ranks, on_device_ranks

from flux_megatron import errors, ops, settings
from flux_megatron.problem import Plan, Tile
from flux_megatron.symm import call_log, lru_cache, objects
from flux_megatron.symm import workspace as workspace_module
from flux_megatron.symm.channel import Channel, rounded
from flux_megatron.symm.lru_cache import LRUCache
from flux_megatron.symm.word_channel import WordChannel
from flux_megatron.symm.workspaces import workspace

KEPT = 200  # shapes, in place of `SHAPES`


def test_the_entry_that_was_used_longest_ago_goes():
    cache: LRUCache[str, int] = LRUCache(2)
    cache["a"], cache["b"] = 1, 2
    assert cache.get("a") == 1
    cache["c"] = 3
    assert cache == {"a": 1, "c": 3}
    assert "a" in cache
    assert cache["a"] == 1
    cache["a"] = 4
    cache["d"] = 5
    assert cache == {"c": 3, "d": 5}, "neither `in` nor [] is a use"
    assert cache.get("a") is None


@given(st.integers(1, 2**40))
def test_a_size_is_rounded_by_at_most_an_eighth(size):
    assert size <= rounded(size) <= max(size + size // 8, -(-size // 4096) * 4096)
    assert rounded(size) % 4096 == 0
    assert rounded(rounded(size)) == rounded(size)


def test_a_channel_grows_a_few_times():
    assert len({rounded(size) for size in range(2**20, 2**21, 1000)}) == 9


def begins(rank: int, kind: type[Channel], *sizes: int) -> None:
    space = workspace(dist.group.WORLD, here())
    for size in sizes:
        space.end(space.begin("words" if kind is WordChannel else "gather", size, kind))


@on_device_ranks(1)
def test_a_slightly_larger_call_needs_no_growth(rank):
    begins(rank, Channel, 10**6)
    channel = workspace(dist.group.WORLD, here()).channels["gather"]
    regions = channel._regions
    begins(rank, Channel, 10**6 + 40_000)
    assert channel._regions is regions


@on_device_ranks(2, limit_s=60)
def test_ranks_that_disagree_about_a_growth_are_all_told(rank):
    begins(rank, Channel, 5000)
    said = r"rank 0: gather grows to 1000000 bytes.*rank 1: gather grows to 1000001 bytes"
    with pytest.raises(errors.ProblemMismatch, match=said):
        begins(rank, Channel, (10**6, 10**6 + 1)[rank])
    begins(rank, Channel, 10**6)  # nothing is lost


@on_cpu_ranks(2, limit_s=15)  # nobody waits for the deadline
def test_a_rank_that_makes_another_call_ends_a_growth(rank):
    """Rank 1 makes a call that needs no more memory."""
    space = workspace(dist.group.WORLD, here())
    begins(rank, Channel, 5000)
    time.sleep(0.5 * rank)
    calls = (lambda: begins(rank, Channel, 10**6), lambda: space.note("a smaller call"))
    with pytest.raises(errors.ProblemMismatch, match="a smaller call"):
        calls[rank]()


@on_cpu_ranks(2, limit_s=12, environment={"FLUX_MEGATRON_TIMEOUT_S": "1"})
def test_a_rank_that_comes_to_a_growth_when_the_others_have_left_is_told(rank):
    begins(rank, Channel, 5000)
    time.sleep(3 * rank)
    said = ("rank 1: no answer", "rank 0: refused: no answer of rank 1 within 1 s")[rank]
    with pytest.raises(errors.ProblemMismatch, match=said):
        begins(rank, Channel, 10**6)


@on_cpu_ranks(2, limit_s=12, environment={"FLUX_MEGATRON_TIMEOUT_S": "1"})
def test_a_late_rank_is_named_where_a_file_is_the_store(rank):
    agreement = workspace(dist.group.WORLD, here()).agreement
    file = objects.broadcast(tempfile.mkstemp()[1], dist.group.WORLD)
    agreement._store = dist.FileStore(file, 2)
    time.sleep(3 * rank)
    said = ("rank 1: no answer", "rank 0: refused: no answer of rank 1 within 1 s")[rank]
    with pytest.raises(errors.ProblemMismatch, match=said):
        agreement.confirm("a question")


@on_device_ranks(2, environment={"FLUX_MEGATRON_TIMEOUT_S": "20"})
def test_a_new_time_limit_holds_for_shapes_that_are_known(rank):
    """It stands in the steps of programs."""
    x, w = torch.ones(6, 16, device=DEVICE), torch.ones(16, 16, device=DEVICE)
    limits = []
    for seconds in ("20", "30"):
        os.environ["FLUX_MEGATRON_TIMEOUT_S"] = seconds
        settings.reload()
        ops.all_gather_gemm(x, w, dist.group.WORLD, plan=Plan("pipelined"))
        (program,) = workspace(dist.group.WORLD, here()).programs.values()
        limits.append(program.timeout_ns)
    assert limits == [20 * 10**9, 30 * 10**9]


@pytest.mark.parametrize(("kind", "name"), [(Channel, "pipelined"), (WordChannel, "low_latency")])
@on_device_ranks(2)
def test_growth_frees_the_memory_before(rank, kind, name):
    """Which regions live on when a channel has grown, though there is a program of its calls."""
    space = workspace(dist.group.WORLD, here())
    begins(rank, kind, 5000)
    x, w = (torch.ones(*shape, device=DEVICE) for shape in ((6, 16), (16, 16)))
    ops.all_gather_gemm(x, w, dist.group.WORLD, plan=plan_of(name, tile=Tile(16, 16, 16)))
    (channel,) = (one for one in space.channels.values() if type(one) is kind)
    assert space.programs
    region = channel._regions[0]
    known = [weakref.ref(one) for one in (*channel._regions, region._data, *region._data.shards)]
    del channel, region
    begins(rank, kind, 10**6)
    assert not any(one() for one in known)


@pytest.mark.skipif(DEVICE == "cuda", reason="GPUs of several nodes have no log")
@on_cpu_ranks(1)
def test_descriptions_of_calls_are_bounded(rank):
    space = workspace(dist.group.WORLD, here())
    for number in range(2 * call_log.ENTRIES):
        space.note(f"call {number}")
    known = space.log._digests
    assert len(known) == call_log.ENTRIES
    oldest, digest = next(iter(known.items()))
    assert space.log._describe(digest) == oldest


@on_cpu_ranks(2)
def test_keys_of_questions_are_taken_back(rank):
    agreement = workspace(dist.group.WORLD, here()).agreement
    store, counts = dist.distributed_c10d._get_default_store(), set()
    for number in range(20):
        agreement.confirm(f"question {number}")
        dist.barrier()
        counts.add(store.num_keys())
        dist.barrier()
    assert len(counts) == 1, counts


@on_cpu_ranks(4)
def test_requests_of_a_question_do_not_grow_with_the_ranks(rank):
    """All ranks of a job have one server."""
    agreement = workspace(dist.group.WORLD, here()).agreement
    requests = []

    class Counted:
        def __init__(self, store):
            self._store = store

        def __getattr__(self, name):
            requests.append(name)
            return getattr(self._store, name)

    agreement.confirm("a question, so that there is one to take back")
    agreement._store = Counted(agreement._store)
    agreement.confirm("a question")
    assert requests == ["set", "set", "wait", "multi_get", "delete_key"]


@on_device_ranks(2)
def test_a_decision_that_was_dropped_asks_nobody(rank):
    """Whether a call asks the other ranks: for the first time, again, and when it was dropped:
    ranks need not drop the same, so the table of the layer kind stays.
    """
    space, w = workspace(dist.group.WORLD, here()), torch.ones(4, 2, device=DEVICE)
    asked = []
    for _ in range(3):
        number = space.agreement._number
        x = torch.ones(2, 2, device=DEVICE)
        ops.all_gather_gemm(x, w, dist.group.WORLD, plan=Plan("sequential"))
        asked.append(space.agreement._number > number)
        if len(asked) == 2:
            space.checked.clear()
    assert asked == [True, False, False]


@on_device_ranks(1)
def test_what_a_region_knows_of_shapes_is_bounded(rank):
    begins(rank, Channel, 5000)
    region = workspace(dist.group.WORLD, here()).channels["gather"]._regions[0]
    for size in range(2000):
        region.prepared(lambda region, size: size, size)
    assert len(region._prepared) == lru_cache.LIMIT


@on_device_ranks(2)
def test_what_is_kept_does_not_grow_with_the_number_of_shapes(rank):
    group, plan = dist.new_group([0, 1]), Plan("pipelined")
    with mock.patch.object(workspace_module, "SHAPES", KEPT):
        space = workspace(group, here())
    order = [*range(1, KEPT + 1), *random.Random(0).sample(range(1, KEPT + 1), KEPT)]
    sizes, w = [], torch.ones(4, 2, device=DEVICE)
    for rows in order:
        x = torch.ones(2 * rows, 2, device=DEVICE)
        ops.all_gather_gemm(x[:rows], w, group, plan=plan)
        ops.gemm_reduce_scatter(x, w, group, plan=plan)
        sizes.append(space.size_bytes)
    assert len({*sizes[KEPT - 1 :]}) == 1, "memory follows the largest call and stays"
    assert len(space.checked) == len(space.programs) == KEPT
