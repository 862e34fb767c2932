"""Runs of one experiment beside each other: arms, speedups, losses, and the paper's figure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flux_megatron.lab.results import logs, statistics, summary
from flux_megatron.lab.results.iterations import ResultsError, Series
from flux_megatron.lab.results.statistics import Speedup
from flux_megatron.lab.results.summary import ArmSummary, Parity
from flux_megatron.launch import run_folder
from flux_megatron.launch.experiment import Experiment
from flux_megatron.launch.workload import Arm

PAIRS: tuple[tuple[Arm, Arm], ...] = (
    ("te", "megatron"),
    ("flux", "megatron"),
    ("flux", "te"),
)  # who is compared with whom


@dataclass(frozen=True)
class Run:
    """A run folder of `flux-megatron launch`, or a round of it, as far as its arms have come."""

    folder: Path
    experiment: Experiment
    arms: dict[Arm, Series]  # of the experiment's arms those that have iterations


def read(run: Path) -> list[Run]:
    """The run, or where its arms alternate all its rounds, of which the last may not have begun.

    `ResultsError` where there is no experiment, no iteration, or a line that cannot be read.
    """
    found = [_read(folder) for folder in run_folder.of_run(run)]
    if not any(one.arms for one in found):
        arms = ", ".join(found[0].experiment.arms)
        raise ResultsError(f"{run}: no iteration of any arm ({arms}) yet")
    return found


def _read(folder: Path) -> Run:
    try:
        experiment = run_folder.read(folder)
    except ValueError as error:
        raise ResultsError(str(error)) from None
    arms: dict[Arm, Series] = {}
    for arm, workload in experiment.arms.items():
        if experiment.program == "train":
            series = logs.of_train(folder / arm / "train")
        else:
            series = logs.of_megatron(folder / arm / "logs", workload.training.global_batch)
        if series.iterations:
            arms[arm] = series
    return Run(folder, experiment, arms)


@dataclass(frozen=True)
class Comparison:
    """`run` is None for that of all runs. `paper` is its figure for this pair, where it has one."""

    arm: Arm
    baseline: Arm
    run: int | None
    speedup: Speedup
    paper: str | None


@dataclass(frozen=True)
class LossPair:
    arm: Arm
    baseline: Arm
    run: int
    parity: Parity | None


@dataclass(frozen=True)
class Report:
    """`arms` has a summary for each run, in the order of `runs`."""

    experiment: Experiment
    runs: list[Run]
    arms: list[dict[Arm, ArmSummary]]
    speedups: list[Comparison]
    losses: list[LossPair]

    @property
    def machine(self) -> str:
        """What the experiment says that it ran on."""
        workload = next(iter(self.experiment.arms.values()))
        ranks = workload.parallel.world_size
        if self.on_cpu:
            return f"{ranks} ranks on a CPU, kernels interpreted"
        return f"{ranks} x {workload.cluster.gpu}"

    @property
    def on_cpu(self) -> bool:
        return any(workload.cluster.gpu == "cpu" for workload in self.experiment.arms.values())

    def plain(self) -> dict[str, Any]:
        """For JSON: SI units; numbers that JSON has not are strings."""
        return {
            "experiment": self.experiment.name,
            "machine": self.machine,
            "paper": self.experiment.paper,
            "runs": [
                {
                    "folder": str(run.folder),
                    "arms": {arm: _plain(one) for arm, one in arms.items()},
                    "missing": [arm for arm in self.experiment.arms if arm not in run.arms],
                }
                for run, arms in zip(self.runs, self.arms, strict=True)
            ],
            "speedups": _plain(self.speedups),
            "losses": _plain(self.losses),
        }


def reports(runs: Sequence[Run], loss_bound: float | None = None) -> list[Report]:
    """One for each experiment; runs that resolved to the same arms are repeats of it."""
    groups: list[list[Run]] = []
    for run in runs:
        same = (group for group in groups if _what(group[0]) == _what(run))
        group = next(same, None)
        if group is None:
            groups.append([run])
        else:
            group.append(run)
    return [_report(group, loss_bound) for group in groups]


def _report(runs: list[Run], loss_bound: float | None) -> Report:
    experiment = runs[0].experiment
    arms = [
        {arm: summary.summarise(series, experiment.arms[arm]) for arm, series in run.arms.items()}
        for run in runs
    ]
    speedups, losses = [], []
    for arm, baseline in PAIRS:
        both = [i for i, run in enumerate(runs) if arm in run.arms and baseline in run.arms]
        speedups += _speedups(runs, both, arm, baseline)
        for i in both:
            mine, theirs = runs[i].arms[arm], runs[i].arms[baseline]
            dtype = experiment.arms[arm].training.dtype
            pair = summary.parity(mine, theirs, dtype, loss_bound)
            losses.append(LossPair(arm, baseline, i, pair))
    return Report(experiment, runs, arms, speedups, losses)


def _speedups(runs: list[Run], both: list[int], arm: Arm, baseline: Arm) -> list[Comparison]:
    experiment = runs[0].experiment
    figure = experiment.paper.get(f"speedup_over_{baseline}") if arm == "flux" else None
    paper = None if figure is None else str(figure)
    found = []
    for i in both:
        ours, theirs = (
            summary.warm_times(runs[i].arms[a], experiment.arms[a].training.warmup_steps)
            for a in (arm, baseline)
        )
        if ours and theirs:
            speedup = statistics.speedup(theirs, ours)
            found.append(Comparison(arm, baseline, i, speedup, paper))
    if len(found) > 1:
        together = statistics.speedup_of_runs([one.speedup.ratio for one in found])
        found.append(Comparison(arm, baseline, None, together, paper))
    return found


def _what(run: Run) -> tuple[Any, ...]:
    experiment = run.experiment
    return experiment.name, experiment.arms, experiment.extra_arguments


def _plain(value: Any) -> Any:
    """Dataclasses as dictionaries, their properties included."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        names += [n for n, v in vars(type(value)).items() if isinstance(v, property)]
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
