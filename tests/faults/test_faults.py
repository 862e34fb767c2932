"""A job ends in time, by name and without a trace, whatever happens to it; `run.py` tries more."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import types

import pytest

pytest.importorskip("megatron.core", reason="needs the extra `train`")

import fault_case
import run
import torch
from fault_case import Case, World
from fault_kinds import FAULTS
from forked_processes import kept

if torch.cuda.is_available():
    pytest.skip("real GPUs: `tests/faults/run.py --device cuda`", allow_module_level=True)


BOUND_S = 4.0


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    run.prepare("cpu")
    from flux_megatron.lab.train import rank_processes

    made = World(tmp_path_factory.mktemp("faults") / "world", "cpu", BOUND_S)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_processes, "GRACE_S", 2.0)
        made.seconds = kept(made.prepare)
        yield made


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault(world, name):
    end = run.try_once(world, name, "suite")
    assert not end.wrong, end.wrong
    assert (end.ended, end.named, end.orphans, end.leftovers) == (True, True, 0, 0), end


@pytest.mark.parametrize("disturb", [
    lambda case, job: case.limit_files(job, 0, 0),
    lambda case, job: case.strike(job, 0, signal.SIGKILL),
], ids=["limit_files", "strike"])  # fmt: skip
def test_a_rank_that_has_ended_is_no_try(world, tmp_path, monkeypatch, disturb):
    """It may end between the look and the fault."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    monkeypatch.setattr(fault_case, "ending", lambda pid: False)
    job = types.SimpleNamespace(rank=lambda number: gone.pid)
    with pytest.raises(fault_case.Ended):
        disturb(Case(tmp_path / "case", "gone", world), job)


def test_a_job_that_hangs_is_noticed(world, monkeypatch):
    """With the patience that gloo has by itself."""
    monkeypatch.setattr(world, "bound_s", 1800.0)
    monkeypatch.setattr(world, "limit_s", 5.0)
    end = run.try_once(world, "SIGSTOP of one rank", "hang")
    assert not end.ended
    assert not end.named


def test_orphans_and_other_bits_are_noticed(world, tmp_path):
    end = kept(_with_an_orphan, world, tmp_path / "case")
    assert end.orphans == 1
    assert "optimizer" in end.wrong


def _with_an_orphan(world, folder):
    case = Case(folder, "orphan", world)
    job = case.start(plant=_leave_a_process, settings={"train.lr": 0.5})
    return case.same(case.end(job, 60), job)


def _leave_a_process(rank):
    if rank == 0 and not os.fork():
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)
