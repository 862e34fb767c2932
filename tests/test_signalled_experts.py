"""`signalled` experts: exact against the reference in any number of bands, also between nodes."""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import test_expert_parallel as tests
import torch
import torch.distributed as dist
from closeness import assert_exact
from ranks import DEVICE, on_cpu_ranks, on_device, on_device_ranks

import flux_megatron
from flux_megatron import errors
from flux_megatron.expert_parallel import bands, host_counts, ops, signalled
from flux_megatron.expert_parallel.bands import Order
from flux_megatron.kernels.experts import signalled as kernels
from flux_megatron.problem import MAX_GROUPS, Plan
from flux_megatron.symm import places
from flux_megatron.symm.workspaces import workspace


def plan_of(bands: int, tma: bool = False) -> Plan:
    return Plan("signalled", tile=replace(tests.SMALL, tma=tma), bands=bands, comm_sms=8)


@pytest.mark.parametrize(
    ("world_size", "splits", "layouts", "routings"),
    [
        (1, 2, ("nn",), (tests.uneven, tests.nothing)),
        (2, 3, ("nt", "nn"), tests.ROUTINGS),
        (3, 2, ("nn", "nt"), (tests.uneven, tests.one_rank)),
        (4, MAX_GROUPS, ("nn", "nt"), (tests.uneven, tests.one_rank, tests.idle_source)),
    ],
)
def test_exact(world_size, splits, layouts, routings):
    for counted in on_device(tests.calls, world_size, plan_of(splits), layouts, routings):
        assert counted == {"signalled": 2 * len(routings)}


def test_exact_of_eight_ranks():
    plan = replace(plan_of(3), tile=replace(tests.SMALL, block_m=32, block_n=32, block_k=32))
    for counted in on_device(
        tests.calls, 8, plan, ("nt", "nn"), (tests.uneven, tests.idle_source), 1
    ):
        assert counted == {"signalled": 4}


def test_exact_by_tma():
    on_device(tests.calls, 2, plan_of(2, tma=True), ("nt", "nn"), (tests.uneven, tests.one_rank))


@pytest.mark.parametrize("strategy", ["auto", "signalled"])
@on_cpu_ranks(4, environment={"FLUX_MEGATRON_STRATEGY": "{strategy}"})
def test_between_nodes_where_fused_cannot(rank):
    """A layer's forward and backward on ranks of two hosts, without shared memory between them."""
    with mock.patch.object(places, "machine", return_value=f"node-{rank // 2}"):
        tests.calls(rank, None, ("nt",), (tests.uneven, tests.idle_source))  # no plan
    assert "spans 2 nodes" in workspace(dist.group.WORLD, torch.device("cpu")).unavailable
    report = flux_megatron.report()
    assert report.calls == {("a2a_gemm", "signalled"): 4, ("gemm_a2a", "signalled"): 4}
    assert not report.fallbacks


@pytest.mark.parametrize(("strategy", "overlapped"), [("auto", "fused"), ("signalled",) * 2])
@on_device_ranks(2, environment={"FLUX_MEGATRON_STRATEGY": "{strategy}"})
def test_what_no_kernel_takes_falls_back(rank, overlapped):
    x, w = torch.ones(6, 4, device=DEVICE), torch.ones(3, 8, 4, device=DEVICE)
    counts = torch.ones(2, 3, dtype=torch.int32, device=DEVICE)
    flux_megatron.reset_report()
    for dtype in (torch.float32, torch.float64):
        ops.a2a_gemm(x.to(dtype), w.to(dtype), counts, dist.group.WORLD, capacity=7)
    report = flux_megatron.report()
    assert [*report.calls] == [("a2a_gemm", overlapped), ("a2a_gemm", "sequential")]
    ((_, reason),) = report.fallbacks
    assert reason == "dtype float64 is none of float32, bfloat16, float16"


REFUSED = {
    "capacity": "^rank 1 receives 24 rows, capacity for at most 23 given$",
    "counts": "the counts of rank 1 name 14 rows, 12 expected",
}


@pytest.mark.parametrize("spoil", REFUSED)
@on_device_ranks(2)
def test_rows_that_do_not_fit_are_refused_by_all_ranks(rank, spoil):
    given, group = (
        tests.operands(tests.one_rank, 2, 3, 20, 24, torch.float32, "nt", spare=0),
        dist.group.WORLD,
    )
    x, w, counts = (one[rank].to(DEVICE) for one in (given.x, given.w, given.counts))
    spoiled, capacity = counts.clone(), given.capacity - (spoil == "capacity")
    if spoil == "counts" and rank == 1:
        spoiled[0, 1] = 2
    with pytest.raises(errors.CapacityExceeded, match=REFUSED[spoil]):
        ops.a2a_gemm(x, w, spoiled, group, capacity=capacity, plan=plan_of(2))
    # nothing has begun, so the group is whole
    ops.a2a_gemm(x, w, counts, group, capacity=given.capacity, plan=plan_of(2))


@on_cpu_ranks(2)
def test_an_error_in_the_middle_breaks_the_group(rank):
    given = tests.operands(tests.uneven, 2, 3, 20, 24, torch.float32, "nt", spare=0)
    x, w, counts, group = given.x[rank], given.w[rank], given.counts[rank], dist.group.WORLD
    call = {"capacity": given.capacity, "plan": plan_of(2)}
    with (
        mock.patch.object(signalled, "signalled_experts", side_effect=RuntimeError("no kernel")),
        pytest.raises(RuntimeError, match="no kernel"),
    ):
        ops.a2a_gemm(x, w, counts, group, **call)
    with pytest.raises(errors.GroupBroken, match="no kernel"):
        ops.a2a_gemm(x, w, counts, group, **call)


@on_cpu_ranks(1)
def test_a_capture_is_refused_by_name(rank):
    counts = torch.ones(1, 2, dtype=torch.int32)
    space = workspace(dist.group.WORLD, counts.device)
    with (
        mock.patch.object(host_counts, "capturing", return_value=True),
        pytest.raises(errors.WorkspaceError, match="counts on the host"),
    ):
        host_counts.all_counts(counts, 2, 4, space)


def counts_of(ranks: int, experts: int, seed: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    every = torch.randint(0, 40, (ranks, ranks, experts), generator=made)
    return (every * (torch.rand(every.shape, generator=made) < 0.6)).to(torch.int32)


def order_of(every: torch.Tensor, rank: int, splits: int, block_m: int) -> Order:
    counts = tuple(every.flatten().tolist())
    return bands.order_of(counts, len(every), rank, splits, block_m, torch.device("cpu"))


@pytest.mark.parametrize(("ranks", "experts"), [(1, 3), (2, 1), (2, 5), (3, 2), (8, 1), (8, 4)])
def test_all_ranks_cut_alike(ranks, experts):
    """What one rank sends in a band is what the other expects, and each row travels once."""
    for seed, splits in ((0, 1), (1, 4), (2, 100)):
        every = counts_of(ranks, experts, seed)
        orders = [order_of(every, rank, splits, 16) for rank in range(ranks)]
        (number,) = {len(order.bands) for order in orders}
        assert number <= min(splits, MAX_GROUPS, experts * (ranks - 1))
        for band in zip(*(order.bands for order in orders), strict=True):
            assert any(last > first for one in band for first, last in one.far)
            for here in range(ranks):
                for other in range(ranks):
                    (a, b), (c, d) = band[here].far[other], band[other].tokens[here]
                    assert b - a == d - c, "what one rank sends is what the other expects"
        for rank, order in enumerate(orders):
            travelled = [piece for band in order.bands for piece in band.far]
            rows = sorted(row for first, last in travelled for row in range(first, last))
            remote = int(every[:, rank].sum() - every[rank, rank].sum())
            assert len(rows) == len(set(rows)) == remote
            tiles = -(-every[:, rank] // 16)
            assert order.near_tile_rows == int(tiles[rank].sum())
            assert sum(band.tile_rows for band in order.bands) + order.near_tile_rows == tiles.sum()


def test_bands_have_about_as_many_rows_each():
    """Also where one expert gets a third of all rows."""
    even = torch.full((2, 2, 32), 100, dtype=torch.int32)
    assert [band.tile_rows for band in order_of(even, 0, 4, 100).bands] == [8, 8, 8, 8]
    skewed = even.clone()
    skewed[:, :, 0] = 1600
    sizes = [band.tile_rows for band in order_of(skewed, 0, 4, 100).bands]
    assert sum(sizes) == 47
    assert max(sizes) <= 18


def test_the_library_s_all_to_all_gets_the_pieces_as_they_are():
    """As on GPUs: no copy before it or after it."""
    group, pieces = mock.Mock(), [SimpleNamespace(device=torch.device("cuda"))] * 2
    signalled.exchange(group, pieces, pieces, space=None)
    assert group.mock_calls == [mock.call.alltoall(pieces, pieces), mock.call.alltoall().wait()]


def test_a_band_without_rows_here_is_no_launch():
    """A launch that no CTA ends would leave its claims behind."""
    order = order_of(torch.zeros(2, 2, 3, dtype=torch.int32), 0, 4, 16)
    assert (order.bands, order.near_tile_rows) == ([], 0)
    kernels.signalled_experts(
        *[torch.empty(0, 4)] * 3, torch.ones(3, 8, 4), order.table, far_groups=3, first=0,
        tile_rows=0, counters=order.table, work_counter=order.table, spare_sms=0, back=True,
        layout="nt", tile=tests.SMALL,
    )  # fmt: skip


def test_the_table_names_each_group_once():
    every = counts_of(3, 2, 5)
    order = order_of(every, 1, 2, 16)
    rows = order.table[kernels.ROWS.value]
    assert order.far_groups == 4
    assert_exact(rows[4:], every[1, 1])
    assert_exact(rows[:4], torch.stack([every[2, 1], every[0, 1]], 1).flatten())
    assert order.table[kernels.EXPERT.value].tolist() == [0, 0, 1, 1, 0, 1]
