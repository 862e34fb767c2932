"""The race: who runs when, whose time counts, and what one failing rank does to the others."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from ranks import run_ranks

from flux_megatron.overlap.timing import host_time_us, race

CPU = torch.device("cpu")


def _order(rank):
    calls = []
    candidates = {name: lambda name=name: calls.append(name) for name in "abc"}
    race(candidates, group=dist.group.WORLD, device=CPU, rounds=2, warmup=1)
    return "".join(calls)


def test_every_round_runs_every_candidate_once():
    assert run_ranks(_order, 2) == ["abc" + "abc" * 2] * 2


def _late(rank):
    sleep_s = 0.02 if rank == 1 else 0.0
    candidates = {"uneven": lambda: time.sleep(sleep_s), "quick": lambda: None}
    return race(candidates, group=dist.group.WORLD, device=CPU, rounds=3, warmup=1)


def test_the_slowest_rank_counts_in_every_round():
    first, second = run_ranks(_late, 2)
    assert first == second
    assert len(first.times_us["uneven"]) == 3
    assert min(first.times_us["uneven"]) >= 20_000 > max(first.times_us["quick"])
    assert first.median_us("uneven") == sorted(first.times_us["uneven"])[1]


def _failing(rank):
    def fails_here():
        if rank == 1:
            raise ValueError("not on this rank")

    def collective():
        dist.all_reduce(torch.ones(1))

    def nowhere():
        raise NotImplementedError("on no rank")

    candidates = {"partly": fails_here, "good": collective, "never": nowhere}
    return race(candidates, group=dist.group.WORLD, device=CPU, rounds=2)


def test_a_failure_on_one_rank_is_a_failure_on_all():
    results = run_ranks(_failing, 2)
    assert results[0] == results[1]
    assert [*results[0].times_us] == ["good"]
    assert results[0].failures == {
        "partly": "rank 1: ValueError: not on this rank",
        "never": "NotImplementedError: on no rank",
    }


def _all_fail(rank):
    def fails():
        raise ValueError("no")

    return race({"a": fails}, group=dist.group.WORLD, device=CPU)


def test_a_race_without_finishers_has_no_times():
    assert run_ranks(_all_fail, 2)[0].times_us == {}


def test_host_time_is_that_of_one_call():
    assert 2000 <= host_time_us(lambda: time.sleep(0.002), CPU, n=5) < 20_000
