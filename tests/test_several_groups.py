"""Symmetric memory of any process group, of several at once, and made anew."""

from __future__ import annotations

import inspect
import random

import pytest
import torch
import torch.distributed as dist
from cases import Case, check
from closeness import assert_exact
from ranks import DEVICE, FUSED, be_late, on_device_ranks

import flux_megatron
from flux_megatron import ops
from flux_megatron.nn import functions
from flux_megatron.problem import Plan
from flux_megatron.symm.workspace import release, workspaces

PATTERNS = ("ag_gemm", "gemm_rs")


@on_device_ranks(4, environment=FUSED)
def test_subgroups_at_the_same_time(rank):
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


@on_device_ranks(4, environment=FUSED)
def test_a_group_without_some_ranks(rank):
    group = dist.new_group([1, 3])
    if rank in (1, 3):
        for pattern in PATTERNS:
            check(Case(pattern, 13, 7, 5), group)
    dist.barrier()


@on_device_ranks(2, environment=FUSED)
def test_two_groups_over_the_same_ranks(rank):
    """Two groups over the same ranks have memory of their own, also with calls of both open."""
    first, second = dist.group.WORLD, dist.new_group([0, 1])
    x, w = (torch.full(s, 1.0 + rank, device=DEVICE) for s in ((6, 4), (5, 4)))
    scatters = [ops.start_gemm_rs(x * n, w, group) for n, group in ((1, first), (2, second))]
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
