"""The folder of a launched experiment; whoever reads results begins with its `experiment.json`.

RUN/experiment.json          the experiment as it was resolved, and how it was launched
RUN/job.sbatch               trains the arms in turn
RUN/cache/                   measured plans and compiled kernels, of all arms
RUN/preflight/JOB-RESTART/   a file for each node: was it fit?
RUN/ARM/command.sh           what every node runs for an arm
RUN/ARM/{started,done}       when its ranks started first, and when they had come to the end
RUN/ARM/failures             of the first arm: a line for each time that the job queued up again
RUN/ARM/logs/node-N/JOB-RESTART_*/attempt_0/RANK/{stdout,stderr}.log     torchrun's
RUN/ARM/train/               program train: the folder of `flux-megatron train`
RUN/ARM/checkpoints/         program pretrain_gpt, with --save-interval

Where arms alternate, as several do by default, RUN/round-N/ holds all of this for each
round but job.sbatch, cache/ and preflight/.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from flux_megatron import config_files
from flux_megatron.launch import schema
from flux_megatron.launch.command_line import Command
from flux_megatron.launch.errors import LaunchError
from flux_megatron.launch.experiment import Experiment
from flux_megatron.version import __version__

MAY_CHANGE = ("training.steps",)  # when a run is resumed


class _Record(BaseModel):
    format: Literal[1]
    experiment: Experiment


def refuse_used(run: Path) -> None:
    """`LaunchError` if anything is in `run`: no run is ever overwritten."""
    if run.exists() and (not run.is_dir() or any(run.iterdir())):
        raise LaunchError(
            f"{run} exists and is not empty: --resume continues it, --run-dir names another"
        )


def refuse_other(run: Path, experiment: Experiment) -> None:
    """`LaunchError` unless `run` holds this experiment, with the same values of each arm."""
    old, new = _values(read(run)), _values(experiment)
    if changed := config_files.differences(old, new, but=MAY_CHANGE):
        raise LaunchError(f"{run} cannot be resumed with other values: {changed}")


def _values(experiment: Experiment) -> dict[str, Any]:
    arms = {str(arm): asdict(workload) for arm, workload in experiment.arms.items()}
    return {"name": experiment.name, "program": experiment.program} | arms


def of_run(run: Path) -> list[Path]:
    """The folders with an experiment.json: `run`, or where arms alternate its rounds in order."""
    rounds = [file.parent for file in run.glob("round-*/experiment.json")]
    return sorted(rounds, key=lambda folder: int(folder.name.removeprefix("round-"))) or [run]


def write_job(run: Path, job: str) -> Path:
    _replace(run / "job.sbatch", job)
    return run / "job.sbatch"


def write(
    run: Path, experiment: Experiment, commands: Sequence[Command], how: dict[str, Any]
) -> None:
    """Fill `run`, or a round. `how`: what was given on the command line, for the record.

    What was launched before may fail as often again, and is not done where it gets more steps.
    """
    run.mkdir(parents=True, exist_ok=True)
    more = (run / "experiment.json").exists() and _values(read(run)) != _values(experiment)
    record = {
        "format": 1,
        "flux_megatron": __version__,
        **how,
        "experiment": asdict(experiment),
        "arguments": {command.arm: command.arguments for command in commands},
        "environment": {command.arm: command.environment for command in commands},
    }
    _replace(run / "experiment.json", json.dumps(record, indent=2, default=str) + "\n")
    for command in commands:
        command.folder.mkdir(exist_ok=True)
        (command.folder / "failures").unlink(missing_ok=True)
        if more:
            (command.folder / "done").unlink(missing_ok=True)
        for name, text in command.files.items():
            _replace(command.folder / name, text)
        _replace(command.folder / "command.sh", command.script())


def read(run: Path) -> Experiment:
    """The experiment of a run folder; `LaunchError` if it is none."""
    file = run / "experiment.json"
    try:
        return _Record.model_validate_json(file.read_bytes()).experiment
    except OSError:
        raise LaunchError(f"{run} is no run folder: it has no experiment.json") from None
    except ValidationError as error:
        raise LaunchError(f"{file}: {schema.said(error)}") from None


def _replace(file: Path, text: str) -> None:
    """Atomically: a job that reads meanwhile sees the old file or the new one."""
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text)
    os.replace(partial, file)
