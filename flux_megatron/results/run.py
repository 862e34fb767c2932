"""A run folder of `flux-megatron launch`: its experiment, and what every arm has written so far."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flux_megatron.launch import run_folder
from flux_megatron.launch.experiment import Experiment
from flux_megatron.perf.workload import Arm
from flux_megatron.results import megatron_log, train_log
from flux_megatron.results.iterations import ResultsError, Series


@dataclass(frozen=True)
class Run:
    folder: Path
    experiment: Experiment
    arms: dict[Arm, Series]  # of the experiment's arms those that have iterations


def read(folder: Path) -> Run:
    """`ResultsError` where there is no experiment, no iteration, or a line that cannot be read."""
    try:
        experiment = run_folder.read(folder)
    except ValueError as error:
        raise ResultsError(str(error)) from None
    arms: dict[Arm, Series] = {}
    for arm, workload in experiment.arms.items():
        if experiment.program == "train":
            series = train_log.read(folder / arm / "train")
        else:
            series = megatron_log.read(folder / arm / "logs", workload.training.global_batch)
        if series.iterations:
            arms[arm] = series
    if not arms:
        raise ResultsError(f"{folder}: no iteration of any arm ({', '.join(experiment.arms)}) yet")
    return Run(folder, experiment, arms)
