"""The pool of ranks that serves tests on GPUs, here with processes of the CPU."""

from __future__ import annotations

import os
import time

import pytest
import rank_pool
import rank_process
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cases import Case, check
from ranks import DEVICE, RankFailure, run_ranks

import flux_megatron
from flux_megatron import settings
from flux_megatron.symm.device import copy_engine
from flux_megatron.symm.workspace import workspaces
from flux_megatron.tuning import choice, tuner

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="these ranks are of the CPU")


@pytest.fixture(autouse=True)
def _no_pool_is_left():
    yield
    rank_pool.stop_all()


def served(body, *args, limit_s: float = 30, environment=None, fresh: bool = False) -> list:
    return rank_pool.run(
        body, 2, args, limit_s=limit_s, environment=environment or {}, fresh=fresh, device="cpu"
    )


def process(rank: int) -> int:
    return os.getpid()


def test_one_pool_serves_many_bodies_and_fresh_ones_stay_alone():
    pool = served(process)
    assert len({*pool, os.getpid()}) == 3
    assert not {*served(process, fresh=True)} & {*pool}
    assert not {*served(process, environment={"OMP_NUM_THREADS": "1"})} & {*pool}
    assert served(process) == pool


def disturbs(rank: int) -> None:
    check(Case("ag_gemm", 5, 4, 3))
    os.environ["FLUX_MEGATRON_STRATEGY"] = "pipelined"
    settings.reload()
    check(Case("ag_gemm", 5, 4, 3, seed=1))
    tuner.race, choice._spent_s = None, 7.0
    copy_engine(torch.device("cpu"))
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(5)


def state(rank: int) -> tuple:
    report = flux_megatron.report()
    return (
        settings.get().strategy, os.environ.get("FLUX_MEGATRON_STRATEGY"), report.total,
        report.workspace_bytes, len(workspaces()), tuner.race is None, choice._spent_s,
        torch.get_default_dtype(), torch.initial_seed(), copy_engine.cache_info().currsize,
    )  # fmt: skip


def test_a_body_finds_nothing_of_the_one_before():
    served(process)
    first = served(state)
    served(disturbs, environment={"FLUX_MEGATRON_STRATEGY": "fused"})
    assert served(state) == first
    assert first[0][:2] == ("auto", None)


def test_settings_are_those_of_the_test(monkeypatch):
    served(process)
    monkeypatch.setenv("FLUX_MEGATRON_STRATEGY", "sequential")
    assert {one[0] for one in served(state)} == {"sequential"}
    assert {one[0] for one in served(state, environment={"FLUX_MEGATRON_STRATEGY": "fused"})} == {
        "fused"
    }


def fails(rank: int) -> None:
    assert rank == 0, "planted"


def hangs(rank: int) -> None:
    time.sleep(60 * rank)


def ends(rank: int) -> None:
    os._exit(3 * rank)


def groups(rank: int) -> None:
    dist.new_group([0, 1])


def world(rank: int) -> None:
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("body", "said"),
    [(fails, "AssertionError: planted"), (hangs, "rank 1: no answer"), (ends, r"\(exit code 3\)"),
     (groups, None), (world, None)],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_processes_that_a_body_has_spoilt_serve_nobody(body, said):
    pool = served(process)
    if said is None:
        served(body)
    else:
        with pytest.raises(RankFailure, match=said) as failure:
            served(body, limit_s=2)
        assert "These processes ran before: process." in str(failure.value)
    assert not {*served(process)} & {*pool}


def test_ranks_of_the_cpu_are_forked_for_each_body():
    assert not {*run_ranks(process, 2)} & {*run_ranks(process, 2)}


def test_spawned_processes_serve_too():
    """As on GPUs: a spawned process looks for its queues by name, after `start` has returned."""
    pool = rank_pool.Pool(rank_process.Ranks(2, "cpu", mp.get_context("spawn"), {}))
    try:
        answers = pool.run(process, (), 60, {})
    finally:
        pool.ranks.stop()
    assert len({*answers, os.getpid()}) == 3
