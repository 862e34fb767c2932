"""How a host that waits is told: the doorbell, the places of ranks, the wait for a collective."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from flux_megatron import errors
from flux_megatron.overlap import collectives
from flux_megatron.symm import doorbell
from flux_megatron.symm.places import Place, why_unavailable
from flux_megatron.symm.status import Status

CPU = torch.device("cpu")


def test_who_is_rung_answers_every_time():
    rung = threading.Semaphore(0)
    answer = rung.release
    address = doorbell.address(answer)
    for _ in range(3):
        doorbell.ring(["/proc/0/fd/0", address])  # the first one has ended
        assert rung.acquire(timeout=10)
    assert doorbell.address(answer) == address, "one thread a process"


def test_ranks_of_two_nodes_have_no_symmetric_memory():
    here, there, gpu = Place("cpu", "a", ""), Place("cpu", "b", ""), Place("cuda", "a", "")
    assert why_unavailable([here, here]) is None
    assert "spans 2 nodes" in str(why_unavailable([here, there]))
    with pytest.raises(errors.ProblemMismatch, match=r"rank 0: cpu, rank 1: cuda"):
        why_unavailable([here, gpu])


def test_waits_end_by_the_first_reason():
    status = Status(CPU)
    assert not status.tripped
    status.end_waits("another call")
    status.end_waits("a third one")
    assert status.tripped
    assert (status.mismatch, status.late(), status.refused()) == ("another call", "", "")


def workspace(check=lambda: None) -> SimpleNamespace:
    return SimpleNamespace(device=CPU, check=check)


def test_a_collective_that_never_ends_is_left():
    def learns() -> None:
        raise errors.ProblemMismatch("another call")

    work = SimpleNamespace(wait=threading.Event().wait)
    with pytest.raises(errors.ProblemMismatch, match="another call"):
        collectives.wait(work, workspace(learns))


def test_the_error_of_a_collective_is_raised():
    def fails() -> None:
        raise RuntimeError("/gloo/ closed")

    with pytest.raises(RuntimeError, match="closed"):
        collectives.wait(SimpleNamespace(wait=fails), workspace())
