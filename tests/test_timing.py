"""The race: who runs when, whose time counts, and what one failing rank does to the others."""

import itertools
import time
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from races import agreed
from ranks import be_late, here, on_cpu_ranks, on_device_ranks

from flux_megatron.lab.bench.candidates import host_time_us
from flux_megatron.lab.bench.options import LOADS
from flux_megatron.tuning import beside, timing
from flux_megatron.tuning.beside import Load, NoRoom, second_communicator
from flux_megatron.tuning.timing import race

CPU = torch.device("cpu")


@on_cpu_ranks(2)
def test_the_slowest_rank_counts_in_every_round(rank):
    sleep_s = 0.02 if rank == 1 else 0.0
    candidates = {"uneven": lambda: time.sleep(sleep_s), "quick": lambda: None}
    raced = agreed(race(candidates, group=dist.group.WORLD, device=CPU, rounds=3, warmup=1))
    assert raced.outlived == {}, "beside nothing"
    assert len(raced.times_us["uneven"]) == 3
    assert min(raced.times_us["uneven"]) >= 20_000 > max(raced.times_us["quick"])
    assert raced.median_us("uneven") == sorted(raced.times_us["uneven"])[1]


@on_cpu_ranks(2)
def test_the_hosts_work_is_added_where_it_is_asked_for(rank):
    calls, given = {"a call": lambda: time.sleep(0.02)}, {"device": CPU, "rounds": 2, "warmup": 1}
    alone, added = (
        race(calls, group=dist.group.WORLD, with_host=with_host, **given).median_us("a call")
        for with_host in (False, True)
    )
    assert alone < 40_000 <= added


@pytest.mark.parametrize(("host_ms", "hidden_ms"), [(1, [1.5, 1.5]), (5, [1.5, 3, 6, 6])])
def test_a_host_that_is_late_hides_more_in_the_next_turn(monkeypatch, host_ms, hidden_ms):
    """Of a device whose clock runs at 2 GHz."""
    slept_ms = []

    def event(enable_timing):
        late = host_ms > sum(slept_ms[-2:])
        return mock.Mock(**{"query.return_value": late, "elapsed_time.return_value": 1.0})

    stand_ins = {
        "synchronize": mock.Mock(), "Event": event,
        "_sleep": lambda cycles: slept_ms.append(cycles / 2e6),
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(dist, "all_reduce", mock.Mock())
    turn = timing._CudaTurns(0.0)
    for _ in hidden_ms:
        assert turn(lambda: None, None, CPU, None) == 1000.0
    assert slept_ms[::2] == hidden_ms


@on_cpu_ranks(2)
def test_a_failure_on_one_rank_is_a_failure_on_all(rank):
    not_here = ValueError("not on this rank") if rank == 1 else None
    candidates = {
        "partly": mock.Mock(side_effect=not_here), "good": lambda: dist.all_reduce(torch.ones(1)),
        "never": mock.Mock(side_effect=NotImplementedError("on no rank")),
    }  # fmt: skip
    raced = agreed(race(candidates, group=dist.group.WORLD, device=CPU, rounds=2))
    assert [*raced.times_us] == ["good"]
    assert raced.failures == {
        "partly": "rank 1: ValueError: not on this rank",
        "never": "NotImplementedError: on no rank",
    }
    del candidates["good"]
    assert race(candidates, group=dist.group.WORLD, device=CPU).times_us == {}


@on_cpu_ranks(2, limit_s=20)
def test_a_failure_in_a_timed_round_ends_the_race_alike_on_all(rank):
    """The first one: what failed later may have failed because of it. Ranks stay in step."""
    turns: list[str] = []

    def candidate(name: str) -> None:
        turns.append(name)
        if len(turns) in ((6, 9) if rank else (7,)):  # b; of rank 0 c, then of rank 1 a
            raise MemoryError(f"no room for {name}")

    calls = {name: partial(candidate, name) for name in "abcd"}
    given = {"group": dist.group.WORLD, "device": CPU, "rounds": 3, "warmup": 0}
    with pytest.raises(timing.FailedLater) as caught:
        race(calls, **given)
    assert (caught.value.name, caught.value.why) == ("b", "rank 1: MemoryError: no room for b")
    assert turns == [*"abcd"] * 3
    agreed(race(calls, **given).times_us)


def test_host_time_is_that_of_one_call():
    assert 2000 <= host_time_us(lambda: time.sleep(0.002), CPU, n=5) < 20_000


class Recorded(Load):
    """Notes in `log` what is done with the blocks, and how many there are."""

    log: list[str]

    def start(self) -> None:
        self.log.append("start")
        super().start()
        self.log.append(f"{self.blocks} blocks")

    def wait(self) -> None:
        self.log.append("wait")
        super().wait()


@pytest.mark.parametrize("collective", LOADS)
@on_cpu_ranks(2)
def test_the_load_starts_before_each_candidate_and_ends_before_the_next(rank, collective):
    timing.Load, Recorded.log = Recorded, []
    candidates = {name: lambda name=name: Recorded.log.append(name) for name in "ab"}
    given = {"group": dist.group.WORLD, "device": CPU, "rounds": 2, "warmup": 1}
    race(candidates, **given, beside=True, collective=collective)
    many = Recorded.log[-3]
    assert Recorded.log == [
        *"ab", *"ab",  # the warmup, and each alone
        *["start", "1 blocks", "wait"] * (1 + beside.TRIALS),
        *["start", many, "a", "wait", "start", many, "b", "wait"] * 2,
    ]  # fmt: skip


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("collective", LOADS)
@on_cpu_ranks(2)
def test_the_load_is_the_collective_that_was_asked_for(rank, collective, together):
    """NCCL's blocks are one launch; Gloo's come in turn."""
    second = mock.Mock(supports_coalescing=together)
    with mock.patch.object(beside, "second_communicator", return_value=second):
        load = beside.Load(dist.group.WORLD, CPU, 1.0, collective)
    second.reset_mock()
    load.blocks = 2
    load.start()
    done = [name for name, *_ in second.method_calls]
    if collective == "all_reduce":
        assert done == ["allreduce_coalesced"]
        assert len(second.allreduce_coalesced.call_args.args[0]) == 2
        return
    one = {"all_gather": "_allgather_base", "reduce_scatter": "_reduce_scatter_base"}[collective]
    around = (["_start_coalescing"], ["_end_coalescing"]) if together else ([], [])
    assert done == [*around[0], one, one, *around[1]]
    given, taken = getattr(second, one).call_args.args
    if collective == "reduce_scatter":
        given, taken = taken, given
    assert len(given) == 2 * len(taken)


@on_cpu_ranks(2)
def test_the_blocks_are_as_many_on_every_rank_and_enough_for_the_slowest(rank):
    timing.Load, Recorded.log = Recorded, []
    candidates = {"uneven": lambda: time.sleep(0.03 * rank), "quick": lambda: None}
    raced = race(candidates, group=dist.group.WORLD, device=CPU, rounds=2, beside=True)
    blocks = agreed([word for word in Recorded.log if word.endswith("blocks")])
    assert [*agreed(raced).times_us] == [*raced.outlived] == ["uneven", "quick"]
    assert min(raced.times_us["uneven"]) >= 30_000
    assert int(blocks[-1].split()[0]) > 2
    assert beside.blocks(1000.0, 1600.0) == 3
    assert beside.blocks(14_000.0, 1600.0) == 19


@on_device_ranks(2)
def test_a_candidate_that_outlives_the_all_reduces_is_counted(rank):
    """Rank 1 takes much longer in the rounds that are beside others."""
    calls = itertools.count(1)
    candidates = {
        "grows": lambda: be_late(0.5 if rank == 1 and next(calls) > 4 else 0.001),
        "stays": lambda: be_late(0.001),
    }
    raced = race(candidates, group=dist.group.WORLD, device=here(), rounds=3, beside=True)
    assert agreed(raced).outlived["grows"] == 3, raced
    assert raced.outlived["stays"] < 3


@on_cpu_ranks(3, limit_s=30)
def test_the_second_communicator_is_made_once_and_asks_nobody_else(rank):
    """Rank 1 has fewer groups than the others."""
    world, pair = dist.group.WORLD, dist.new_group([0, 2])
    second = second_communicator(world, CPU)
    assert second is second_communicator(world, CPU)
    ranks = torch.tensor([float(rank)])
    second.allreduce([ranks]).wait()
    if rank != 1:  # who is not asked
        second = second_communicator(pair, CPU)
        assert (second.rank(), second.size()) == (rank // 2, 2)
        second.allreduce([ranks]).wait()
    assert ranks.item() == (6.0, 3.0, 6.0)[rank]


@on_cpu_ranks(2, limit_s=30)
def test_no_room_on_one_rank_is_known_to_all(rank):
    zeros = torch.zeros

    def full(*shape, **options):
        if rank == 1 and shape == (beside.BLOCK_BYTES["cpu"] // 4,):
            raise torch.OutOfMemoryError("full")
        return zeros(*shape, **options)

    torch.zeros = full
    with pytest.raises(NoRoom, match=r"beside: rank 1: full$"):
        Load(dist.group.WORLD, CPU, 1.0)
