"""Problems for the tuner, and races that run nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from ranks import DEVICE, here

from flux_megatron.overlap import registry
from flux_megatron.problem import Pattern, Plan, Problem
from flux_megatron.tuning import tuner
from flux_megatron.tuning.plan_entry import Entry
from flux_megatron.tuning.timing import Race


def some_problem(pattern: str, layout: str = "nt", M: int = 12, dtype: str = "float32") -> Problem:
    return Problem(Pattern(pattern), M, 24, 36, dtype, dist.get_world_size(), layout, DEVICE)


def measured(problem: Problem, plans: list[Plan], **options) -> Entry:
    return tuner.measure(problem, plans, dist.group.WORLD, here(), **options)


def defaults(problem: Problem, *names: str) -> list[Plan]:
    return [registry.strategy(problem, name).default_plan(problem) for name in names]


def agreed(value: Any) -> Any:
    """The value, which every rank has."""
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    assert all(other == value for other in every), every
    return value


class FakeRace:
    """Times by strategy; runs nothing. `turns` are the strategies of each race, `rounds` how often
    they would have run, `beside` says which were beside others, `with_host` in which the
    host's work counted; on its own clock, for who puts it in the place of `time`, a race takes
    `takes_s`.
    """

    def __init__(self, time_us: Callable[[str], float], takes_s: float = 0.0) -> None:
        self.turns: list[list[str]] = []
        self.rounds: list[int] = []
        self.beside: list[bool] = []
        self.with_host: list[bool] = []
        self._time_us, self._takes_s = time_us, takes_s

    def monotonic(self) -> float:
        return len(self.turns) * self._takes_s

    def __call__(
        self, candidates, *, group, device, rounds, warmup=3, beside=False, gap_s=0.0,
        with_host=False,
    ) -> Race:  # fmt: skip
        names = [n if n in ("", tuner.AGAIN) else Plan.loads(n).strategy for n in candidates]
        self.turns.append(names)
        self.rounds.append(rounds)
        self.beside.append(beside)
        self.with_host.append(with_host)
        times = zip(candidates, names, strict=True)
        return Race({text: [self._time_us(name)] * rounds for text, name in times}, {})
