"""A failure ends with the group that it belongs to: what other groups of the process, and those
that come later, then do.
"""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from cases import Case, check
from ranks import DEVICE, here, on_device_ranks

import flux_megatron
from flux_megatron import errors, ops
from flux_megatron.symm.workspaces import workspace

SHORT = {"FLUX_MEGATRON_STRATEGY": "pipelined", "FLUX_MEGATRON_TIMEOUT_S": "2"}
GATHER, SCATTER = Case("ag_gemm", 6, 8, 4), Case("gemm_rs", 5, 7, 3)


def wait_in_vain(rank: int, group: dist.ProcessGroup) -> None:
    """Rank 0 makes a call that rank 1 never makes."""
    check(SCATTER, group)
    if rank == 0:
        x, w = torch.ones(10, 3, device=DEVICE), torch.ones(7, 3, device=DEVICE)
        with pytest.raises(errors.SignalTimeout):  # noqa: PT012, the second on GPUs
            ops.gemm_reduce_scatter(x, w, group)
            flux_megatron.synchronize()
    dist.barrier()


def calls(group: dist.ProcessGroup) -> None:
    for case in (GATHER, SCATTER):
        check(case, group)


@pytest.mark.parametrize("how", ["untouched", "new", "destroyed"])
@on_device_ranks(2, environment=SHORT)
def test_another_group_knows_nothing_of_it(rank, how):
    failed, other = dist.new_group([0, 1]), dist.new_group([0, 1])
    if how == "untouched":
        calls(other)
    wait_in_vain(rank, failed)
    if how == "destroyed":
        dist.destroy_process_group(failed)
        flux_megatron.confirm_step()
    calls(other)
    if how != "destroyed" and rank == 0:
        with pytest.raises(errors.SignalTimeout):
            check(SCATTER, failed)
        with pytest.raises(errors.SignalTimeout):
            flux_megatron.check()  # asks all groups
    for group in (failed, other)[how == "destroyed" :]:
        dist.destroy_process_group(group)
    calls(dist.group.WORLD)
    flux_megatron.confirm_step()


@on_device_ranks(2, environment=SHORT, fresh=True)
def test_all_groups_are_made_anew_in_the_same_processes(rank):
    store, backend = dist.distributed_c10d._get_default_store(), dist.get_backend()
    bound = dist.group.WORLD.bound_device_id
    for number in range(2):
        pair = dist.new_group([0, 1])
        calls(dist.group.WORLD)
        wait_in_vain(rank, pair)
        del pair
        dist.destroy_process_group()
        gc.collect()
        flux_megatron.check()
        dist.init_process_group(
            backend, store=dist.PrefixStore(f"again {number}", store), rank=rank, world_size=2,
            device_id=bound,
        )  # fmt: skip
    calls(dist.new_group([0, 1]))
    calls(dist.group.WORLD)
    flux_megatron.confirm_step()


@on_device_ranks(2, environment=SHORT)
def test_a_difference_of_calls_ends_the_waits_of_its_group_alone(rank):
    groups = dist.new_group([0, 1]), dist.new_group([0, 1])
    spaces = [workspace(group, here()) for group in groups]
    spaces[0]._status.end_waits("the ranks made different calls")
    with pytest.raises(errors.ProblemMismatch):
        spaces[0].check()
    calls(groups[1])
    for group in groups:
        dist.destroy_process_group(group)
