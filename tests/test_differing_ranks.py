"""What the calls of several ranks may not differ in, beside shapes: whether there are rows, and the
settings that lead to a plan. Every rank is told, also where no log compares the calls.
"""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import Case, check
from ranks import DEVICE, FUSED, on_cpu_ranks, on_device_ranks

from flux_megatron import errors, ops, pieces, settings
from flux_megatron.overlap import registry
from flux_megatron.symm import places

SHORT = {"FLUX_MEGATRON_TIMEOUT_S": "6"}


def gathers(x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup) -> None:
    call = pieces.start_gather(x, w, group)
    call.complete()
    call.close()


def gathers_and_scatters(x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup) -> None:
    gather, scatter = pieces.start_gather_and_gemm_rs(x, x, w.t(), group)
    gather.complete()
    gather.close()
    scatter.finish()


OPERATIONS = {
    "ag_gemm": ops.all_gather_gemm, "gemm_rs": ops.gemm_reduce_scatter,
    "gemm_ar": ops.gemm_all_reduce, "gather": gathers, "gather and scatter": gathers_and_scatters,
}  # fmt: skip


@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
@pytest.mark.parametrize("name", OPERATIONS)
@on_device_ranks(2, environment=SHORT | FUSED)
def test_no_rows_on_one_rank_alone(rank, name, known):
    group, operation = dist.new_group([0, 1]), OPERATIONS[name]
    x, w = torch.ones(8, 4, device=DEVICE), torch.ones(6, 4, device=DEVICE)
    if known:  # so that nobody asks
        operation(x[:0], w, group)
        check(Case("ag_gemm", 8, 6, 4), group)
        check(Case("gemm_rs", 4, 6, 4), group)
    said = []
    for mine in (x[:0] if rank == 0 else x, x):
        try:  # the first may return on rank 0, before the other has come
            operation(mine, w, group)
        except errors.ProblemMismatch as error:
            said.append(str(error))
        dist.barrier()
    assert said
    assert all("M=0" in one or "new to it" in one for one in said), said
    dist.destroy_process_group(group)
    check(Case("ag_gemm", 8, 6, 4))


def said_by(rank: int) -> str:
    x, w = torch.ones(8, 4), torch.ones(6, 4)
    with pytest.raises(errors.ProblemMismatch, match="do not agree") as caught:
        ops.gemm_reduce_scatter(x, w, dist.group.WORLD)
    return str(caught.value)


WAYS = {  # settings of both ranks, and what is said of each
    "strategy": (
        {"STRATEGY": "sequential"},
        {"STRATEGY": "signalled"},
        " by sequential",
        " by signalled",
    ),
    "strategy or none": ({}, {"STRATEGY": "signalled"}, " by auto", " by signalled"),
    "strict": ({}, {"STRICT": "1"}, " by auto", " by auto, strictly"),
    "beside": ({"BESIDE": "0"}, {"BESIDE": "1"}, " by auto", ", beside others by auto"),
}


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("way", WAYS)
@on_cpu_ranks(2, environment=SHORT)
def test_settings_that_lead_to_a_plan(rank, way, nodes):
    variables, words = WAYS[way][:2], WAYS[way][2:]
    os.environ |= {f"FLUX_MEGATRON_{name}": text for name, text in variables[rank].items()}
    settings.reload()
    with mock.patch.object(places, "machine", return_value=f"node {rank % nodes}"):
        said = said_by(rank)
    for other in range(2):
        problem = f"rank {other}: gemm_rs M=8 N=6 K=8 nt float32 over 2 ranks on cpu"
        assert f"{problem}{words[other]}" in said


@on_cpu_ranks(2, environment=SHORT)
def test_what_one_node_cannot_run(rank):
    """As with another Triton there."""
    refusal = registry.refusal

    def of_this_node(problem, name, *more):
        refused = rank == 1 and name == "signalled"
        return "no such kernel" if refused else refusal(problem, name, *more)

    with (
        mock.patch.object(places, "machine", return_value=f"node {rank}"),
        mock.patch.object(registry, "refusal", of_this_node),
    ):
        said = said_by(rank)
    assert "by auto (can run: signalled)" in said
    assert "by auto (can run: none)" in said
