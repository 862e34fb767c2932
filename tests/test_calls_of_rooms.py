"""Experts' and embeddings' calls among others: whoever fails, lacks samples or makes another call,
every rank learns it within the bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_cpu_ranks

from flux_megatron import embedding_all_to_all, errors, ops
from flux_megatron.expert_parallel import ops as experts
from flux_megatron.expert_parallel import sequential
from flux_megatron.problem import Plan, Tile

SHORT = {"FLUX_MEGATRON_TIMEOUT_S": "4"}
SOON_S = 3.0
MATRICES, COUNTS = torch.ones(1, 4, 4), torch.tensor([[2], [2]], dtype=torch.int32)
BANDS = Plan("signalled", tile=Tile(16, 16, 16), bands=2)


def sent(plan: Plan) -> torch.Tensor:
    x, group = torch.ones(4, 4), dist.group.WORLD
    return experts.a2a_gemm(x, MATRICES, COUNTS, group, capacity=8, plan=plan)[0]


def pooled(samples: int = 2, **options: object) -> torch.Tensor:
    """Of so many samples of all ranks, a bag of one entry each."""
    indices, offsets = torch.zeros(samples, dtype=torch.int64), torch.arange(samples + 1)
    return embedding_all_to_all(MATRICES, indices, offsets, dist.group.WORLD, **options)


def gathered() -> torch.Tensor:
    plan = Plan("sequential")
    return ops.all_gather_gemm(torch.ones(4, 4), torch.ones(4, 4), dist.group.WORLD, plan=plan)


CALLS: dict[str, Callable[[], torch.Tensor]] = {
    "experts": lambda: sent(Plan("sequential")),
    "experts, signalled": lambda: sent(BANDS),
    "embedding": pooled,
    "embedding, not validated": lambda: pooled(strategy="sequential", validate=False),
}


@pytest.mark.parametrize("name", CALLS)
@on_cpu_ranks(2, environment=SHORT)
def test_another_call_beside_it_ends_the_wait_at_once(rank, name):
    for call in (CALLS[name], gathered):
        call()
    if rank == 0:
        time.sleep(0.5)  # rank 1 waits
    started = time.monotonic()
    with pytest.raises(errors.ProblemMismatch, match="made different calls"):
        (CALLS[name] if rank else gathered)()
    assert time.monotonic() - started < SOON_S


@on_cpu_ranks(2, environment=SHORT)
def test_two_plans_of_experts_are_two_calls(rank):
    plans = Plan("sequential"), Plan("fused", 8)
    for plan in plans:
        sent(plan)
    with pytest.raises(errors.ProblemMismatch, match=r'"sequential".*"fused"'):
        sent(plans[rank])


@pytest.mark.parametrize("validate", [True, False])
@on_cpu_ranks(2, environment=SHORT)
def test_a_rank_alone_has_no_samples(rank, validate):
    pooled(validate=validate)
    with pytest.raises(errors.ProblemMismatch, match="no samples of 2 tables"):
        pooled(2 * rank, validate=validate)


@pytest.mark.parametrize("validate", [True, False])
@on_cpu_ranks(2, environment=SHORT)
def test_no_rank_has_samples(rank, validate):
    for samples in (0, 2, 0):
        assert len(pooled(samples, validate=validate)) == samples // 2


@on_cpu_ranks(2, environment=SHORT)
def test_no_memory_on_one_rank_between_two_collectives_is_found_in_time(rank):
    """Rank 1 goes on to its next call; rank 0 waits for rows of this one."""
    call, no_memory = CALLS["experts"], torch.OutOfMemoryError("no room")
    call()
    if rank == 1:
        lacks = mock.patch.object(sequential, "_exchanged", side_effect=no_memory)
        with lacks, pytest.raises(torch.OutOfMemoryError):
            call()
    with pytest.raises(errors.FluxError) as caught:
        call()
    assert "a call after one that has failed" in str(caught.value)
