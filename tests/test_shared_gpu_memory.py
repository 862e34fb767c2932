"""How ranks come to share the memory of their GPUs, and how it is said that they cannot; torch's
allocations are pretended.
"""

from __future__ import annotations

import os
import warnings
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from cases import Case, check
from ranks import FUSED, on_cpu_ranks, run_ranks

from flux_megatron import errors
from flux_megatron.overlap.report import report
from flux_megatron.symm import cuda_backend, objects, workspace

VARIABLE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
SIZE = 1 << 21
# (UUID, number) of each rank's GPU; what was set before; what torch finds in its rendezvous
CASES = {
    "one visible GPU each": ((("A", 0), ("B", 0)), None, "1"),
    "where the variable says no": ((("A", 0), ("B", 0)), "0", "1"),
    "all GPUs visible": ((("A", 0), ("B", None)), None, None),
    "one GPU for both": ((("A", 0), ("A", 0)), None, None),
    "one GPU for both, as tests have it": ((("A", 0), ("A", 0)), "1", "1"),
}


@contextmanager
def torch_s(uuid: str, failures: dict[str, str]):
    """Stand-ins of torch's symmetric memory; steps of `failures` raise. The variable as it is seen
    in each rendezvous.
    """
    seen: list[str | None] = []

    def empty(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if "empty" in failures:
            raise RuntimeError(failures["empty"])
        return torch.ones(size, dtype=dtype)

    def rendezvous(mine: torch.Tensor, group: str) -> SimpleNamespace:
        seen.append(os.environ.get(VARIABLE))
        if "rendezvous" in failures:
            raise RuntimeError(failures["rendezvous"])
        get_buffer = lambda r, shape, dtype: mine  # noqa: E731
        return SimpleNamespace(get_buffer=get_buffer, buffer_ptrs=[0, 0])

    properties = SimpleNamespace(uuid=uuid)
    with (
        mock.patch.object(symmetric_memory, "empty", empty),
        mock.patch.object(symmetric_memory, "rendezvous", rendezvous),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
        mock.patch.object(torch.cuda, "synchronize"),
    ):
        yield seen


@pytest.mark.parametrize("case", CASES)
@on_cpu_ranks(2)
def test_torch_tells_gpus_apart_by_number_unless_their_uuids_say_more(rank, case):
    gpus, before, found = CASES[case]
    uuid, number = gpus[rank]
    os.environ.pop(VARIABLE, None)
    if before is not None:
        os.environ[VARIABLE] = before
    device = torch.device("cpu") if number is None else torch.device("cpu", number)
    with torch_s(uuid, {}) as seen:
        buffer = cuda_backend.allocate(SIZE, dist.group.WORLD, device)
    assert (seen, os.environ.get(VARIABLE)) == ([found], before)
    assert not buffer.shards[rank].count_nonzero()


@on_cpu_ranks(2)
def test_every_rank_learns_which_one_has_too_little_memory(rank):
    """On one rank only: no rank waits for it in the rendezvous."""
    failures = {"empty": "out of memory\nC++ stack"} if rank == 1 else {}
    with torch_s(str(rank), failures) as seen, pytest.raises(errors.WorkspaceError) as raised:
        cuda_backend.allocate(SIZE, dist.group.WORLD, torch.device("cpu", 0))
    assert not seen
    assert str(raised.value) == "symmetric memory of 2097152 bytes: rank 1: out of memory"


def tried(rank: int, failures: dict[str, str]) -> str | None:
    with torch_s(str(rank), failures):
        return cuda_backend.why_not_shared(dist.group.WORLD, torch.device("cpu", 0))


def test_a_trial_says_on_every_rank_why_there_is_none():
    assert run_ranks(tried, 2, {}) == [None] * 2
    said = "the GPUs share no memory: rank 0: peer access is not supported"
    refused = {"rendezvous": "peer access is not supported\nC++ stack"}
    assert run_ranks(tried, 2, refused) == [said] * 2


def test_objects_travel_on_the_gpu_that_the_group_is_bound_to():
    kinds, gpu = [torch.device("cuda")], torch.device("cuda", 3)
    bound = SimpleNamespace(bound_device_id=gpu, _device_types=kinds)
    assert objects._device(bound) == gpu
    unbound = SimpleNamespace(bound_device_id=None, _device_types=kinds)
    assert objects._device(unbound) == torch.device("cuda")
    also_on_host = SimpleNamespace(bound_device_id=gpu, _device_types=[*kinds, torch.device("cpu")])
    assert objects._device(also_on_host) == torch.device("cpu")


@on_cpu_ranks(2, environment=FUSED)
def test_calls_fall_back_where_gpus_share_no_memory(rank):
    workspace.why_not_shared = lambda group, device: "the GPUs share no memory: rank 0: closed"
    check(Case("ag_gemm", 4, 4, 4))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "flux_megatron")  # it has been said
        check(Case("ag_gemm", 4, 4, 4, seed=1))
    assert report().calls == {("ag_gemm", "sequential"): 2}
    assert report().fallbacks == {("ag_gemm", "the GPUs share no memory: rank 0: closed"): 2}
