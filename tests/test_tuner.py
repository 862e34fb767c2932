"""Measuring is one decision of all ranks: whatever clocks, failures and wrong results do."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from ranks import DEVICE, on_device

from flux_megatron.overlap import fused, registry
from flux_megatron.perf.hardware import H200
from flux_megatron.problem import Pattern, Plan, Problem
from flux_megatron.tuning import beside, tuner
from flux_megatron.tuning.beside import NoRoom
from flux_megatron.tuning.plan_entry import Entry
from flux_megatron.tuning.timing import Race, race

SHORT = {"FLUX_MEGATRON_TIMEOUT_S": "2"}
PLAIN, FUSED, PIPELINED = Plan("sequential"), Plan("fused"), Plan("pipelined")


def settled(plain: list[float], again: list[float], other: list[float]) -> tuple[str, float]:
    times = {PLAIN.dumps(): plain, FUSED.dumps(): other, tuner.AGAIN: again}
    plan, noise_us = tuner.settle(times, PLAIN)
    return plan.strategy, noise_us


def test_the_fastest_wins():
    assert settled([100, 100, 100], [100, 100, 100], [99, 99, 99]) == ("fused", 0)
    times = {PLAIN.dumps(): [9, 9], tuner.AGAIN: [9, 9], FUSED.dumps(): [8, 8]}
    assert tuner.settle(times | {PIPELINED.dumps(): [7, 7]}, PLAIN)[0] == PIPELINED
    assert tuner.settle(times | {PIPELINED.dumps(): [8, 8]}, PLAIN)[0] == FUSED, "the first of two"


def test_sequential_wins_ties_and_what_is_within_its_noise():
    assert settled([100] * 3, [100] * 3, [100] * 3) == ("sequential", 0)
    assert settled([100, 104, 100], [103, 100, 104], [98] * 3) == ("sequential", 4)
    assert settled([100, 104, 100], [103, 100, 104], [95] * 3) == ("fused", 4)
    assert settled([100] * 3, [90] * 3, [85] * 3) == ("sequential", 10), "its better turn counts"


def test_one_lucky_round_does_not_win():
    assert settled([100] * 5, [100] * 5, [10, 101, 101, 101, 10])[0] == "sequential"


def test_what_is_faster_in_nearly_every_round_wins_in_spite_of_noise():
    """Clocks change from turn to turn by more than the plans differ."""
    plain, again = [100, 120, 110, 90] * 3, [115, 100, 95, 110] * 3
    other = [a - 1 for a in map(min, plain, again)]
    assert settled(plain, again, other) == ("fused", 17.5)
    slower_in = [*other[:8], *([200] * 4)]
    assert settled(plain, again, slower_in)[0] == "sequential", "8 of 12 rounds may be chance"
    assert settled(plain[:4], again[:4], other[:4])[0] == "sequential", "4 rounds are too few"


def test_plans_that_are_as_fast_rarely_win():
    draw = random.Random(0)

    def turns() -> list[float]:
        return [draw.gauss(100, 5) for _ in range(tuner.ROUNDS)]

    won = sum(settled(turns(), turns(), turns())[0] == "fused" for _ in range(2000))
    assert won / 2000 < 3 * tuner.CHANCE  # by either rule


def test_plans_that_are_as_fast_rarely_win_a_run_off():
    """Nearly every race ends in one then: the luckiest of three runs off with `sequential`."""
    draw = random.Random(0)

    def race_of(plans: list[Plan], rounds: int) -> dict[str, list[float]]:
        names = [*(plan.dumps() for plan in plans), tuner.AGAIN]
        return {name: [draw.gauss(100, 5) for _ in range(rounds)] for name in names}

    run_off, won = 0, 0
    for _ in range(2000):
        times = race_of([PLAIN, FUSED, PIPELINED, Plan("hopper")], tuner.ROUNDS)
        fastest = tuner._fastest(times)
        if fastest != tuner.settle(times, PLAIN)[0]:
            run_off += 1
            won += (
                tuner.settle(race_of([PLAIN, fastest], tuner.RUN_OFF_ROUNDS), PLAIN)[0] == fastest
            )
    assert run_off > 1000
    assert won / run_off < 2 * tuner.CHANCE


def some_problem(pattern: str, layout: str = "nt", M: int = 12, dtype: str = "float32") -> Problem:
    return Problem(Pattern(pattern), M, 24, 36, dtype, dist.get_world_size(), layout, DEVICE)


def measured(problem: Problem, plans: list[Plan], **options) -> Entry | None:
    device = torch.device(DEVICE, dist.get_rank()) if DEVICE == "cuda" else torch.device("cpu")
    return tuner.measure(problem, plans, dist.group.WORLD, device, **options)


def defaults(problem: Problem, *names: str) -> list[Plan]:
    return [registry.strategy(problem, name).default_plan(problem) for name in names]


class FakeRace:
    """Times by strategy; runs nothing. `turns` are the strategies of each race, `rounds` how often
    they would have run, `beside` says which were beside others; on its own clock, for who puts it
    in the place of `time`, a race takes `takes_s`.
    """

    def __init__(self, time_us: Callable[[str], float], takes_s: float = 0.0) -> None:
        self.turns: list[list[str]] = []
        self.rounds: list[int] = []
        self.beside: list[bool] = []
        self._time_us, self._takes_s = time_us, takes_s

    def monotonic(self) -> float:
        return len(self.turns) * self._takes_s

    def __call__(
        self, candidates, *, group, device, rounds, warmup=3, beside=False
    ) -> Race:  # fmt: skip
        names = [n if n in ("", tuner.AGAIN) else Plan.loads(n).strategy for n in candidates]
        self.turns.append(names)
        self.rounds.append(rounds)
        self.beside.append(beside)
        times = zip(candidates, names, strict=True)
        return Race({text: [self._time_us(name)] * rounds for text, name in times}, {})


def clocks_differ(rank: int) -> tuple[str, list, list]:
    """Each rank's clock has another favourite, and fails another number of rounds."""
    favourite = ("fused", "pipelined", "sequential")[rank]
    tuner.race = FakeRace(lambda name: 100.0 if name == favourite else 200.0 + rank)
    problem = some_problem("ag_gemm")
    plans = defaults(problem, "sequential", "fused", "pipelined")
    entry = measured(problem, plans, seconds=1e9 if rank == 0 else 0.0)
    return entry.dumps(), tuner.race.turns, tuner.race.rounds


def test_clocks_that_differ_give_one_plan():
    answers = on_device(clocks_differ, 3)
    assert len({text for text, _, _ in answers}) == 1
    entry = Entry.loads(answers[0][0])
    assert entry.plan.strategy == "fused", "the leader's"
    assert (entry.rounds, entry.untried) == (tuner.ROUNDS, 0)
    assert all(turns == answers[0][1] for _, turns, _ in answers), "all run the same in one order"
    assert all(rounds == [1, 1, 1, tuner.ROUNDS] for *_, rounds in answers), "as often"
    assert answers[0][1] == [[""], [""], [""], ["sequential", "fused", "pipelined", tuner.AGAIN]]


class NoisyClock:
    """`sequential`'s turns differ by 20 %; fused takes 96 or 105 us, `later` in a run-off. A plan's
    first turn takes a second, on a clock of its own.
    """

    def __init__(self, later: float) -> None:
        self.turns: list[tuple[int, int]] = []
        self._later, self._now = later, 0.0

    def monotonic(self) -> float:
        return self._now

    def __call__(
        self, candidates, *, group, device, rounds, warmup=3, beside=False
    ) -> Race:  # fmt: skip
        fast = self._later if rounds == tuner.RUN_OFF_ROUNDS else 96.0
        times: dict[str, list[float]] = {}
        for text in candidates:
            shift = 2 * (text == tuner.AGAIN)
            if text in ("", tuner.AGAIN) or Plan.loads(text) == PLAIN:
                times[text] = [120.0 if (n + shift) % 3 == 0 else 100.0 for n in range(rounds)]
            else:
                times[text] = [fast + 9 * (n % 5 in (0, 2)) for n in range(rounds)]
        if rounds > 1:
            self.turns.append((len(candidates), rounds))
        else:
            self._now += 1.0
        return Race(times, {})


def noisy(rank: int, later: float, seconds: float) -> tuple[Entry, list[tuple[int, int]]]:
    tuner.race = tuner.time = NoisyClock(later)
    problem = some_problem("ag_gemm")
    plans = defaults(problem, "sequential", "fused", "pipelined")
    return measured(problem, plans, seconds=seconds), tuner.race.turns


def test_two_plans_that_noise_cannot_tell_apart_run_off():
    for entry, races in on_device(noisy, 2, 96.0, 1e9):
        assert races == [(4, tuner.ROUNDS), (3, tuner.RUN_OFF_ROUNDS)]
        assert (entry.plan.strategy, entry.rounds) == ("fused", tuner.ROUNDS)
        assert {one.plan.strategy for one in entry.measured} == {"sequential", "fused", "pipelined"}


def test_a_run_off_may_be_lost_and_takes_time():
    for entry, races in on_device(noisy, 2, 110.0, 1e9):
        assert races == [(4, tuner.ROUNDS), (3, tuner.RUN_OFF_ROUNDS)]
        assert entry.plan.strategy == "sequential"
    for entry, races in on_device(noisy, 2, 96.0, 3.0):
        assert races == [(4, tuner.FEWEST_ROUNDS)]
        assert entry.plan.strategy == "sequential"


def noisy_on_one(rank: int, noisy_rank: int) -> tuple[Entry, list]:
    """On one rank alone the fastest plan and the winner differ."""
    if rank == noisy_rank:
        return noisy(rank, 96.0, 1e9)
    calm = tuner.race = FakeRace(lambda name: 100.0 if name == "sequential" else 200.0)
    problem = some_problem("ag_gemm")
    plans = defaults(problem, "sequential", "fused", "pipelined")
    entry = measured(problem, plans, seconds=1e9)
    turns = [
        (len(names), rounds)
        for names, rounds in zip(calm.turns, calm.rounds, strict=True)
        if rounds > 1
    ]
    return entry, turns


def test_the_leader_says_whether_there_is_a_run_off_and_who_wins():
    race, run_off = (4, tuner.ROUNDS), (3, tuner.RUN_OFF_ROUNDS)
    for noisy_rank, races, winner in [
        (0, [race, run_off], "fused"), (1, [race], "sequential")
    ]:  # fmt: skip
        for entry, turns in on_device(noisy_on_one, 2, noisy_rank, limit_s=20):
            assert turns == races
            assert entry.plan.strategy == winner


def one_rank_fails(rank: int) -> Entry:
    if rank == 1:
        fused.ag_gemm = refuse
    problem = some_problem("ag_gemm")
    return measured(problem, defaults(problem, "sequential", "fused", "pipelined"))


def refuse(*_: object) -> torch.Tensor:
    raise MemoryError("no room")


def test_a_failure_on_one_rank_fails_the_plan_on_all():
    """It leaves a call open: the next plan needs a new workspace."""
    first, second = on_device(one_rank_fails, 2, environment=SHORT, limit_s=20)
    assert first == second
    (lost,) = first.failed
    assert lost.plan.strategy == "fused"
    assert "rank 1: MemoryError: no room" in lost.reason
    assert "rank 0: SignalTimeout" in lost.reason
    assert {one.plan.strategy for one in first.measured} == {"sequential", "pipelined"}


def wrong_results(rank: int) -> list[tuple[str, str]]:
    right_gather, right_scatter = fused.ag_gemm, fused.start_gemm_rs
    reasons = []

    def stale_rows(*given: object) -> torch.Tensor:
        y = right_gather(*given)
        y[-1] = y[0]
        return y

    def no_wgrad(*given: object) -> torch.Tensor:
        return right_gather(*given[:-1], lambda gathered: None)

    class WithNan:
        def __init__(self, *given: object) -> None:
            self.scatter = right_scatter(*given)

        def finish(self) -> torch.Tensor:
            return self.scatter.finish().index_fill(1, torch.tensor([3], device=DEVICE), torch.nan)

    for pattern, layout, wrong in [
        ("ag_gemm", "nt", stale_rows), ("ag_gemm", "nn", no_wgrad), ("gemm_rs", "nn", WithNan)
    ]:  # fmt: skip
        fused.ag_gemm = wrong if pattern == "ag_gemm" else right_gather
        fused.start_gemm_rs = wrong if pattern == "gemm_rs" else right_scatter
        problem = some_problem(pattern, layout)
        entry = measured(problem, defaults(problem, "sequential", "fused"))
        (lost,) = entry.failed
        reasons.append((entry.plan.strategy, lost.reason))
    return reasons


def test_a_plan_with_wrong_results_has_no_time():
    for answers in on_device(wrong_results, 2):
        assert [plan for plan, _ in answers] == ["sequential"] * 3
        for (_, reason), name in zip(answers, ["y", "dw", "y"], strict=True):
            assert f"ArithmeticError: {name} differs by up to" in reason


def asked_for_beside(rank: int) -> tuple[list[bool], list[bool], Entry]:
    problem = replace(some_problem("ag_gemm"), beside=True)
    plans = defaults(problem, "sequential", "pipelined")
    tuner.race = FakeRace(lambda name: 1.0 if name == "pipelined" else 100.0)
    entry = measured(problem, plans)
    flags = tuner.race.beside
    tuner.race = FakeRace(lambda name: 1.0)
    measured(replace(problem, beside=False), plans)
    return flags, tuner.race.beside, entry


def test_a_problem_beside_others_is_verified_alone_and_raced_beside():
    for flags, alone, entry in on_device(asked_for_beside, 2):
        assert flags == [False, False, True]
        assert not any(alone)
        assert entry.problem.beside
        assert entry.plan.strategy == "pipelined"


def really_beside(rank: int) -> list[Entry]:
    problems = [some_problem("gemm_rs"), some_problem("ag_gemm", "nn")]
    return [
        measured(replace(problem, beside=True), defaults(problem, "sequential", "pipelined"))
        for problem in problems
    ]


def test_plans_are_measured_beside_others():
    first, second = on_device(really_beside, 2)
    assert first == second
    for entry in first:
        assert entry.failed == ()
        assert {one.plan.strategy for one in entry.measured} == {"sequential", "pipelined"}


def no_room_for_blocks(rank: int) -> Entry | None:
    def full(*given: object) -> torch.Tensor:
        raise NoRoom("no bytes for an all-reduce beside")

    beside._block = full
    problem = replace(some_problem("ag_gemm"), beside=True)
    return measured(problem, defaults(problem, "sequential", "pipelined"))


def test_no_room_for_the_blocks_beside_is_no_measurement():
    assert on_device(no_room_for_blocks, 2) == [None, None]


def all_kinds(rank: int) -> list[Entry]:
    found = []
    for pattern in Pattern:
        for layout in ("nt", "nn"):
            problem = some_problem(pattern, layout, 24, "bfloat16")
            names, _ = registry.overlapping(problem, "auto", None)
            entry = measured(problem, tuner.candidates(problem, names, None))
            assert {one.plan.strategy for one in entry.measured} == {"sequential", *names}
            found.append(entry)
    return found


def test_every_kind_of_problem_is_measured_and_right():
    first, second = on_device(all_kinds, 2, limit_s=240)
    assert first == second
    for entry in first:
        assert entry.failed == ()
        built = {*registry.STRATEGIES[entry.problem.pattern]} - {"hopper"}
        assert built <= {one.plan.strategy for one in entry.measured}
        assert all(one.median_us > 0 for one in entry.measured)


def out_of_time(rank: int) -> Entry:
    tuner.race = tuner.time = FakeRace(lambda name: 100.0, takes_s=0.2)
    problem = some_problem("gemm_rs")
    plans = [PLAIN, *(Plan("fused", comm_rows=rows) for rows in range(1, 20))]
    return measured(problem, plans, seconds=0.5)


def test_measuring_ends_in_time_with_what_was_tried():
    first, second = on_device(out_of_time, 2)
    assert first == second
    assert len(first.measured) == 3, "the third began before .5 s were over"
    assert first.untried == 17
    assert first.rounds == tuner.FEWEST_ROUNDS


def no_room(rank: int) -> Entry | None:
    if rank == 1:
        tuner.Trial = out_of_memory
    problem = some_problem("ag_gemm")
    return measured(problem, defaults(problem, "sequential", "fused"))


def out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("no room")


def test_no_room_for_operands_on_one_rank_is_known_to_all():
    assert on_device(no_room, 2) == [None, None]


def later_failure(rank: int) -> Entry:
    """A plan that was right at first fails among the others."""
    calls = [0]

    def tired(candidates, **options) -> Race:
        return race({n: fails if "pipelined" in n else c for n, c in candidates.items()}, **options)

    def fails() -> None:
        calls[0] += 1
        raise RuntimeError("tired")

    tuner.race = tired
    problem = some_problem("ag_gemm")
    return measured(problem, defaults(problem, "sequential", "pipelined", "fused"))


def test_a_plan_that_fails_later_does_not_take_the_others_with_it():
    first, second = on_device(later_failure, 2)
    assert first == second
    assert [lost.plan.strategy for lost in first.failed] == ["pipelined"]
    assert {one.plan.strategy for one in first.measured} == {"sequential", "fused"}
    assert first.untried == 0


def test_hopeless_plans_are_not_measured(monkeypatch):
    problem = Problem(Pattern.AG_GEMM, 64, 4 * 12288, 12288, "bfloat16", 4)
    variants = {"fused": [FUSED, Plan("fused", 32)], "pipelined": [PIPELINED, Plan("pipelined", 8)]}
    monkeypatch.setattr(registry, "candidates", lambda problem, name: variants[name])
    names = ["fused", "pipelined"]
    # without facts all, every strategy's default first
    everything = [PLAIN, FUSED, PIPELINED, Plan("fused", 32), Plan("pipelined", 8)]
    assert tuner.candidates(problem, names, None) == everything
    assert tuner.candidates(problem, names, H200) == [PLAIN, FUSED, Plan("fused", 32)]
    slow = {"pipelined": variants["pipelined"]}
    monkeypatch.setattr(registry, "candidates", lambda problem, name: slow[name])
    assert tuner.candidates(problem, ["pipelined"], H200) == [PLAIN], "sequential always is"
