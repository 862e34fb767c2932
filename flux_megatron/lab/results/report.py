"""Runs of one experiment beside each other: arms, speedups, losses, and the paper's figure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
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

# who is compared with whom
PAIRS: tuple[tuple[Arm, Arm], ...] = (("te", "megatron"), ("flux", "megatron"), ("flux", "te"))


@dataclass(frozen=True)
class Run:
    """A run folder of `flux-megatron launch`, or a round of it, as far as its arms have come."""

    folder: Path
    experiment: Experiment
    arms: dict[Arm, Series]  # of the experiment's arms those that have iterations

    def warm_times(self, arm: Arm) -> list[float]:
        warmup = self.experiment.arms[arm].training.warmup_steps
        return summary.warm_times(self.arms[arm], warmup)


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
        gpu, ranks = self.experiment.cluster.gpu, self.experiment.cluster.gpus
        return f"{ranks} ranks on a CPU, kernels interpreted" if self.on_cpu else f"{ranks} x {gpu}"

    @property
    def on_cpu(self) -> bool:
        return self.experiment.cluster.gpu == "cpu"

    def plain(self) -> dict[str, Any]:
        """For JSON: SI units; numbers that JSON has not are strings."""
        of, runs = self.experiment, []
        for run, arms in zip(self.runs, self.arms, strict=True):
            missing = [arm for arm in of.arms if arm not in run.arms]
            runs.append({"folder": str(run.folder), "arms": _plain(arms), "missing": missing})
        compared = {"speedups": _plain(self.speedups), "losses": _plain(self.losses)}
        known = {"experiment": of.name, "machine": self.machine, "paper": of.paper}
        return {**known, "runs": runs, **compared}


def read(run: Path) -> list[Run]:
    """The run, or where its arms alternate all its rounds, of which the last may not have begun.

    `BadInput` where there is no experiment, no iteration, or a line that cannot be read.
    """
    found = [_read(folder) for folder in run_folder.of_run(run)]
    if not any(one.arms for one in found):
        arms = ", ".join(found[0].experiment.arms)
        raise ResultsError(f"{run}: no iteration of any arm ({arms}) yet")
    return found


def _read(folder: Path) -> Run:
    experiment = run_folder.read(folder)
    arms: dict[Arm, Series] = {}
    for arm, workload in experiment.arms.items():
        if experiment.program == "train":
            series = logs.of_train(folder / arm / "train")
        else:
            series = logs.of_megatron(folder / arm / "logs", workload.training.global_batch)
        if series.iterations:
            arms[arm] = series
    return Run(folder, experiment, arms)


def reports(runs: Sequence[Run], loss_bound: float | None = None) -> list[Report]:
    """One for each experiment; runs that resolved to the same arms of a program are repeats."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        one = run.experiment
        same = one.name, one.program, one.megatron_lm, one.arms, one.extra_arguments
        groups.setdefault(repr(same), []).append(run)
    return [_report(group, loss_bound) for group in groups.values()]


def _report(runs: list[Run], loss_bound: float | None) -> Report:
    experiment, losses = runs[0].experiment, []
    arms = [
        {arm: summary.summarise(series, experiment.arms[arm]) for arm, series in run.arms.items()}
        for run in runs
    ]
    for arm, baseline in PAIRS:
        for i, run in enumerate(runs):
            if {arm, baseline} <= run.arms.keys():
                dtype = experiment.arms[arm].training.dtype
                pair = summary.parity(run.arms[arm], run.arms[baseline], dtype, loss_bound)
                losses.append(LossPair(arm, baseline, i, pair))
    speedups = [one for pair in PAIRS for one in _speedups(runs, *pair)]
    return Report(experiment, runs, arms, speedups, losses)


def _speedups(runs: list[Run], arm: Arm, baseline: Arm) -> Iterator[Comparison]:
    figure = runs[0].experiment.paper.get(f"speedup_over_{baseline}") if arm == "flux" else None
    paper, ratios = None if figure is None else str(figure), []
    for i, run in enumerate(runs):
        if {arm, baseline} <= run.arms.keys():
            theirs, ours = run.warm_times(baseline), run.warm_times(arm)
            if theirs and ours:
                speedup = statistics.speedup(theirs, ours)
                ratios.append(speedup.ratio)
                yield Comparison(arm, baseline, i, speedup, paper)
    if len(ratios) > 1:
        yield Comparison(arm, baseline, None, statistics.speedup_of_runs(ratios), paper)


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
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
