"""What is predicted of an experiment: its arms, and other values of what it assumes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

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
    workloads: dict[Arm, Workload]
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
        """The least and the largest speedup of an arm, over all alternatives."""
        found = [self.speedups(arm, a.steps) for a in self.alternatives if a.steps]
        found.append(self.speedups(arm))
        return min(found), max(found)


def predict(
    name: str, overrides: Mapping[str, Any], arms: Iterable[str] = (), alternatives: bool = False
) -> Predictions:
    """Of `arms`, or all without any; with `alternatives` too.

    `ExperimentError` for what is wrong with the experiment, `ValueError` for an arm that it has
    not and for a cluster that the cost model does not know.
    """
    experiment = experiments.load(name, overrides)
    chosen = [*arms] or [*experiment.arms]
    if unknown := [arm for arm in chosen if arm not in experiment.arms]:
        raise ValueError(f"{name} has arms {[*experiment.arms]}, {unknown} given")
    workloads = _workloads(experiment, chosen)
    return Predictions(
        experiment=experiment,
        workloads=workloads,
        steps=_steps(workloads),
        alternatives=[
            _alternative(name, overrides, {key: value}, chosen)
            for key, values in (experiment.sweep if alternatives else {}).items()
            for value in values
            if not _is_current(workloads, key, value)
        ],
        is_published=not overrides,
    )


def _workloads(experiment: Experiment, arms: Iterable[str]) -> dict[Arm, Workload]:
    return {arm: w for arm, w in experiment.arms.items() if arm in arms}


def _steps(workloads: Mapping[Arm, Workload]) -> Steps:
    return {arm: steps.predict(workload) for arm, workload in workloads.items()}


def _alternative(
    name: str, overrides: Mapping[str, Any], values: dict[str, Any], arms: list[str]
) -> Alternative:
    try:
        workloads = _workloads(experiments.load(name, {**overrides, **values}), arms)
    except ExperimentError as error:
        return Alternative(values, {}, error.rules[0][1])
    return Alternative(values, _steps(workloads))


def _is_current(workloads: Mapping[Arm, Workload], key: str, value: Any) -> bool:
    """Whether all arms have this value of the dotted key already."""
    found = []
    for workload in workloads.values():
        at: Any = asdict(workload)
        for part in key.split("."):
            at = at[part]
        found.append(at)
    return all(at == value for at in found)
