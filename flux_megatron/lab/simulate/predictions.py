"""What is predicted of an experiment: its arms, and other values of what it assumes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flux_megatron.config_files import flat
from flux_megatron.lab.perf import step as steps
from flux_megatron.lab.perf.step import Step
from flux_megatron.launch import experiment as experiments
from flux_megatron.launch.errors import ExperimentError
from flux_megatron.launch.experiment import Experiment
from flux_megatron.launch.workload import Arm, Workload

Steps = dict[Arm, Step]


@dataclass(frozen=True)
class Alternative:
    """The arms with other values, by dotted keys; without steps where the rules refuse them."""

    values: dict[str, Any]
    steps: Mapping[Any, Any]  # what is predicted, by arm
    refused: str = ""


@dataclass(frozen=True)
class Predictions:
    """`baseline` is the arm that speedups are over. `is_published`: no value of the experiment was
    changed, so that its paper's figures are of the same thing.
    """

    experiment: Experiment
    steps: Steps
    alternatives: list[Alternative]
    is_published: bool

    @property
    def baseline(self) -> Arm:
        return "megatron" if "megatron" in self.steps else next(iter(self.steps))

    def speedups(self, arm: Arm, of: Mapping[Arm, Step] | None = None) -> float:
        of = of or self.steps
        return of[self.baseline].step_us / of[arm].step_us

    def paper_speedup(self, over: Arm) -> str:
        """The paper's figure for flux over an arm; empty where there is none of this run."""
        figure = self.experiment.paper.get(f"speedup_over_{over}")
        return str(figure) if figure is not None and self.is_published else ""

    def range(self, arm: Arm) -> tuple[float, float]:
        found = [self.speedups(arm, a.steps) for a in self.alternatives if a.steps]
        found.append(self.speedups(arm))
        return min(found), max(found)


def predict(
    name: str, overrides: Mapping[str, Any], arms: Iterable[str] = (), alternatives: bool = False
) -> Predictions:
    """Of `arms`, or all without any; with `alternatives` too.

    `BadInput` for what is wrong with the experiment, for an arm that it has not, and for a cluster
    that the cost model does not know.
    """
    experiment = experiments.load(name, overrides, [*arms])
    others = [
        _alternative(name, overrides, {key: value}, [*experiment.arms])
        for key, values in (experiment.sweep if alternatives else {}).items()
        for value in values
        if not _is_current(experiment.arms, key, value)
    ]
    return Predictions(experiment, _steps(experiment), others, is_published=not overrides)


def _steps(experiment: Experiment) -> Steps:
    return {arm: steps.predict(workload) for arm, workload in experiment.arms.items()}


def _alternative(
    name: str, overrides: Mapping[str, Any], values: dict[str, Any], arms: list[Arm]
) -> Alternative:
    try:
        experiment = experiments.load(name, {**overrides, **values}, arms)
    except ExperimentError as error:
        return Alternative(values, {}, error.rules[0][1])
    return Alternative(values, _steps(experiment))


def _is_current(workloads: Mapping[Arm, Workload], key: str, value: Any) -> bool:
    """Whether all arms have this value of the dotted key already."""
    return all(flat(asdict(one)).get(key) == value for one in workloads.values())
