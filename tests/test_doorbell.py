"""How a host that waits is told: the doorbell, the places of ranks, the wait for a collective."""

from __future__ import annotations

import threading
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_cpu_ranks

from flux_megatron import errors, ops
from flux_megatron.overlap import collectives
from flux_megatron.symm import doorbell, places
from flux_megatron.symm.places import Place, why_unavailable
from flux_megatron.symm.status import Status
from flux_megatron.symm.workspaces import workspaces

CPU = torch.device("cpu")


def test_who_is_rung_answers_every_time():
    rung = threading.Semaphore(0)
    answer = rung.release
    address = doorbell.address(answer)
    for _ in range(3):
        doorbell.ring(["/proc/0/fd/0", address])  # the first one has ended
        assert rung.acquire(timeout=4)
    assert doorbell.address(answer) == address, "one thread a process"


def test_an_answer_that_fails_is_reported_and_the_next_ring_is_answered():
    rung = threading.Semaphore(0)

    def answer() -> None:
        rung.release()
        raise RuntimeError("dictionary changed size during iteration")

    address = doorbell.address(answer)
    with mock.patch.object(warnings, "warn") as warned:
        for _ in range(2):
            doorbell.ring([address])
            assert rung.acquire(timeout=10)
    assert "a doorbell's answer failed: RuntimeError" in warned.call_args.args[0]


@on_cpu_ranks(2)
def test_ranks_have_symmetric_memory_where_they_can_open_each_others(rank):
    group = dist.group.WORLD
    said = [why_unavailable(places.places(group, CPU, ""), group)]
    with mock.patch.object(places, "machine", return_value=f"kernel {rank}"):
        said.append(why_unavailable(places.places(group, CPU, ""), group))
    with mock.patch.object(places, "_read", return_value="") if rank else nullcontext():
        said.append(why_unavailable(places.places(group, CPU, ""), group))  # as in containers
    assert said[0] is None
    assert "spans 2 nodes" in said[1]
    assert "rank 1 that of rank 0, rank 1 that of rank 1" in said[2]


@pytest.mark.parametrize("strategy", ["auto", "sequential"])
@on_cpu_ranks(2, environment={"FLUX_MEGATRON_STRATEGY": "{strategy}"})
def test_containers_that_cannot_see_each_other_do_without_symmetric_memory(rank):
    places._read = lambda path: ""
    y = ops.all_gather_gemm(torch.ones(2, 3), torch.ones(4, 3), dist.group.WORLD)
    assert y.tolist() == [[3.0] * 4] * 4
    assert "cannot open each other's memory" in workspaces()[0].unavailable


def test_ranks_on_different_devices_are_refused():
    here, gpu = Place("cpu", "a", ""), Place("cuda", "a", "")
    with pytest.raises(errors.ProblemMismatch, match=r"rank 0: cpu, rank 1: cuda"):
        why_unavailable([here, gpu], SimpleNamespace())


def test_waits_end_by_the_first_reason():
    status = Status(CPU)
    assert not status.tripped
    status.end_waits("another call")
    status.end_waits("a third one")
    assert status.tripped
    assert (status.mismatch, status.late(), status.refused()) == ("another call", "", "")


def test_a_collective_that_never_ends_is_left():
    learns = mock.Mock(side_effect=errors.ProblemMismatch("another call"))
    work = SimpleNamespace(wait=threading.Event().wait)
    with pytest.raises(errors.ProblemMismatch, match="another call"):
        collectives.wait(work, SimpleNamespace(device=CPU, check=learns))


def test_the_error_of_a_collective_is_raised():
    work = SimpleNamespace(wait=mock.Mock(side_effect=RuntimeError("/gloo/ closed")))
    with pytest.raises(RuntimeError, match="closed"):
        collectives.wait(work, SimpleNamespace(device=CPU, check=lambda: None))
