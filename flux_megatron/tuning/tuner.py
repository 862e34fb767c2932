"""Measuring: which plan of a problem is the fastest here, decided once for all ranks.

Collective: all ranks time the same plans in the same order, a failure on one rank fails the plan on
all, the slowest rank of a round counts, and the group's leader, rank 0, decides for all.
`sequential` is always among the plans and keeps its place unless another one beats it by more than
its own noise, or in nearly every round; if the fastest does neither, the two run off alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from datetime import datetime, timezone
from typing import Any

import torch
from torch.distributed import ProcessGroup

from flux_megatron.overlap import registry, sequential
from flux_megatron.problem import Plan, Problem
from flux_megatron.symm import objects
from flux_megatron.symm.places import Missing
from flux_megatron.tuning import environment
from flux_megatron.tuning.beside import NoRoom
from flux_megatron.tuning.plan_entry import Entry, Failed, Measured
from flux_megatron.tuning.timing import GAP_S, Candidate, FailedLater, Race, failure_of, race
from flux_megatron.tuning.trial import BY_HOST, Trial

ROUNDS, RUN_OFF = 12, 4  # of a run-off so many times the rounds
AGAIN = "sequential again"  # its second turn in every round
CHANCE = 0.01  # of a plan that is just as fast to be taken for faster

Watch = Callable[[Plan], None]


def candidates(
    problem: Problem, names: Sequence[str], missing: Missing | None = None
) -> list[Plan]:
    """What to measure of the strategies `names`, after `sequential`: their default plans, then all
    variants.
    """
    plans = [registry.candidates(problem, name, missing) for name in names]
    ordered = [variants[0] for variants in plans] + [p for v in plans for p in v[1:]]
    return [sequential.default_plan(problem), *ordered]


class NotMeasured(Exception):
    """Why a problem has no measurement; every rank has the same."""


def measure(
    problem: Problem, plans: Sequence[Plan], group: ProcessGroup,
    device: torch.device, *, rounds: int = ROUNDS, watch: Watch = lambda plan: None,
    all_ran: Callable[[], None] = lambda: None, gap_s: float = GAP_S,
) -> Entry:  # fmt: skip
    """Time the plans in `rounds` rounds; the first is `sequential`. The same entry on every rank.

    `NotMeasured`, on every rank, if one has no memory for a trial, or `sequential`
    itself fails. `watch` is told each plan before its turn; `all_ran`, when each has run once,
    which compiles and loads kernels. A problem `beside` others is raced beside all-reduces.
    """
    made: list[Trial] = []
    _take(lambda: made.append(Trial(problem, group, device)), group)
    with closing(made[0]) as trial:
        for step in (trial.renew, trial.rehearse, trial.learn):
            _take(step, group)
        try:
            return _raced(trial, plans, rounds, watch, all_ran, gap_s)
        except NoRoom as error:
            raise NotMeasured(str(error)) from None


def _take(step: Callable[[], object], group: ProcessGroup) -> None:
    if failure := failure_of(step, group):
        raise NotMeasured(failure)


def _raced(
    trial: Trial, plans: Sequence[Plan], rounds: int, watch: Watch,
    all_ran: Callable[[], None], gap_s: float,
) -> Entry:  # fmt: skip
    group = trial.group
    running: list[Plan] = []
    failed: list[Failed] = []
    for plan in plans:
        watch(plan)
        warm = _race(trial, {"": trial.verified(plan)}, rounds=1, warmup=1)
        if warm.failures:
            failed.append(Failed(plan, warm.failures[""]))
            if not running:
                raise NotMeasured(f"sequential failed: {warm.failures['']}")
            _take(trial.renew, group)
        else:
            running.append(plan)
    all_ran()

    times_us = _final(trial, running, failed, rounds, gap_s)
    settled = settle(times_us, plans[0])
    fastest, won = leaders(group, (_fastest(times_us), settled[0]))
    if fastest != won:
        again = _final(trial, [plans[0], fastest], failed, RUN_OFF * rounds, gap_s)
        settled = settle(again, plans[0])
    return leaders(group, _entry(trial, plans, failed, times_us, rounds, settled))


def _final(
    trial: Trial, plans: Sequence[Plan], failed: list[Failed], rounds: int, gap_s: float
) -> dict[str, list[float]]:
    """Times of the plans, by their text, and of `AGAIN`.

    Where another plan than `sequential` fails all others run anew, without it and without what it
    left behind.
    """
    calls = {plan.dumps(): trial.call(plan) for plan in plans}
    calls[AGAIN] = trial.call(plans[0])
    with_host = any(plan.strategy in BY_HOST for plan in plans)
    beside = trial.problem.beside
    result = _race(trial, calls, rounds=rounds, beside=beside, gap_s=gap_s, with_host=with_host)
    if not result.failures:
        return result.times_us
    for name in {AGAIN, plans[0].dumps()} & result.failures.keys():
        raise NotMeasured(f"sequential failed: {result.failures[name]}")
    failed += [Failed(Plan.loads(text), why) for text, why in result.failures.items()]
    _take(trial.renew, trial.group)
    running = [plan for plan in plans if plan.dumps() not in result.failures]
    return _final(trial, running, failed, rounds, gap_s)


def _race(trial: Trial, calls: Mapping[str, Candidate], **options: Any) -> Race:
    """`race`, where a failure is one, whenever it comes."""
    try:
        return race(calls, group=trial.group, device=trial.device, **options)
    except FailedLater as error:
        return Race({}, {error.name: error.why})


def settle(times_us: Mapping[str, Sequence[float]], plain: Plan) -> tuple[Plan, float]:
    """The winner, and the noise in microseconds: the median difference of `plain` to itself.

    `times_us` holds one time a round for the text of each plan and for `AGAIN`. A plan wins by its
    median, and against `plain` only by more than the noise, or by being faster in nearly every
    round: at the power limit the two turns of `plain`, of 14 ms, differed by 6 %, which hid a gain
    of 4 % (2 x H200, 2026-11-21).
    """
    first, second = times_us[plain.dumps()], times_us[AGAIN]
    noise_us = statistics.median(abs(a - b) for a, b in zip(first, second, strict=True))
    to_beat = min(statistics.median(first), statistics.median(second)) - noise_us
    winner = _fastest(times_us)
    times = times_us[winner.dumps()]
    faster = statistics.median(times) < to_beat or _nearly_always(times, first, second)
    return (winner if faster else plain), noise_us


def _fastest(times_us: Mapping[str, Sequence[float]]) -> Plan:
    """The plan with the least median."""
    medians = {text: statistics.median(times) for text, times in times_us.items() if text != AGAIN}
    return Plan.loads(min(medians, key=medians.__getitem__))


def _nearly_always(
    times_us: Sequence[float], first: Sequence[float], second: Sequence[float]
) -> bool:
    """Whether it was below both others in more rounds than `CHANCE` allows: were all three equally
    fast, it would be the fastest in every third round.
    """
    rounds = len(times_us)
    won = sum(a < min(b, c) for a, b, c in zip(times_us, first, second, strict=True))
    ways = sum(math.comb(rounds, n) * 2 ** (rounds - n) for n in range(won, rounds + 1))
    return ways / 3**rounds <= CHANCE


def leaders(group: ProcessGroup, value: Any) -> Any:
    """The leader's value, on all ranks."""
    return objects.broadcast(value, group)


def _entry(
    trial: Trial, plans: Sequence[Plan], failed: Sequence[Failed],
    times_us: Mapping[str, Sequence[float]], rounds: int, settled: tuple[Plan, float],
) -> Entry:  # fmt: skip
    winner, noise_us = settled
    lost = [one.plan for one in failed]
    measured = [
        Measured(plan, statistics.median(times_us[plan.dumps()]))
        for plan in plans
        if plan.dumps() in times_us and plan not in lost
    ]
    return Entry(
        problem=trial.problem,
        environment=environment.of(trial.device),
        plan=winner,
        measured=tuple(sorted(measured, key=lambda one: one.median_us)),
        failed=tuple(failed),
        untried=0,
        noise_us=noise_us,
        rounds=rounds,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
