"""A job ends in time, by name and without a trace, whatever happens to it; `run.py` tries more."""

from __future__ import annotations

import os
import signal
import time

import pytest

pytest.importorskip("megatron.core", reason="needs the extra `train`")

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
