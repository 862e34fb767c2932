"""The folder of a launched experiment; whoever reads results begins with its `experiment.json`.

docs/cluster.md lists what is in it. Where arms alternate, as several do by default, RUN/round-N/
holds all of it for each round but job.sbatch, job, cache/ and preflight/.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from glob import glob
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from flux_megatron import config_files, option_values
from flux_megatron.launch import schema
from flux_megatron.launch.errors import LaunchError
from flux_megatron.launch.experiment import Experiment
from flux_megatron.launch.workload import Arm
from flux_megatron.version import __version__

ROUND = re.compile(r"round-([1-9]\d*)")  # not a copy of one, as round-2.bak
MAY_CHANGE = ("training.steps",)  # when a run is resumed


@dataclass(frozen=True)
class Given:
    """What a launch was given beside its experiment, with absolute paths; empty or None: nothing.
    A resumed run goes on with it.
    """

    checkout: Path | None = None
    data: tuple[str, ...] = ()
    save_interval: int | None = None
    site: Path | None = None
    env: tuple[str, ...] = ()


class _Record(BaseModel):
    format: Literal[1]
    experiment: Experiment
    given: Given | None = None  # None: a version that kept none wrote it


def refuse_other(run: Path, experiment: Experiment) -> None:
    """`LaunchError` unless `run` holds this experiment, with the same values of each arm."""
    old, new = _values(read(run)), _values(experiment)
    if changed := config_files.differences(old, new, but=MAY_CHANGE):
        raise LaunchError(f"{run} cannot be resumed with other values: {changed}")


def resumed(run: Path, given: Given) -> Given:
    """What a resume is `given`, and from the run all else. `LaunchError` for other data."""
    kept = _record(run).given or given
    if given.data not in ((), kept.data):
        old, new = (" ".join(one.data) or "none" for one in (kept, given))
        raise LaunchError(f"{run} cannot be resumed with other data: --data-path {old} -> {new}")
    every = kept.save_interval if given.save_interval is None else given.save_interval
    env = (*(one for one in kept.env if one not in given.env), *given.env)  # the last one counts
    return Given(given.checkout or kept.checkout, kept.data, every, given.site or kept.site, env)


def _values(experiment: Experiment) -> dict[str, Any]:
    whole = asdict(experiment)
    fixed = {name: whole[name] for name in ("name", "program", "megatron_lm", "extra_arguments")}
    return {**fixed, **whole["arms"]}


def of_run(run: Path) -> list[Path]:
    """The folders with an experiment.json: `run`, or where arms alternate its rounds in order."""
    names = (os.path.dirname(one) for one in glob("round-*/experiment.json", root_dir=run))
    numbers = sorted(int(one[1]) for one in map(ROUND.fullmatch, names) if one)
    return [run / f"round-{number}" for number in numbers] or [run]


def read(run: Path) -> Experiment:
    """The experiment of a run folder; `LaunchError` if it is none."""
    return _record(run).experiment


def _record(run: Path) -> _Record:
    file = run / "experiment.json"
    try:
        return _Record.model_validate_json(file.read_bytes())
    except OSError:
        raise LaunchError(f"{run} is no run folder: it has no experiment.json") from None
    except ValidationError as error:
        raise LaunchError(f"{file}: {schema.said(error)}") from None


def write(
    run: Path, experiment: Experiment, given: Given, arms: Mapping[Arm, Mapping[str, str]]
) -> None:
    """Fill `run`, or a round, with the files of each arm.

    What was launched before may fail as often again, and is not done where it gets more steps.
    """
    run.mkdir(parents=True, exist_ok=True)
    more = (run / "experiment.json").exists() and _values(read(run)) != _values(experiment)
    record = {"format": 1, "flux_megatron": __version__, "command": sys.argv}
    record |= {"experiment": asdict(experiment), "given": asdict(given)}
    option_values.replace(run / "experiment.json", json.dumps(record, indent=2, default=str) + "\n")
    for arm, files in arms.items():
        (run / arm).mkdir(exist_ok=True)
        for name in ("failures", "done") if more else ("failures",):
            (run / arm / name).unlink(missing_ok=True)
        for name, text in files.items():
            option_values.replace(run / arm / name, text)
