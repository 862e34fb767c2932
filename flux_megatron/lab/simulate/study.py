"""Studies of a DLRM on many nodes: their YAML, and what is predicted of them.

    load("study/dlrm-128-nodes", {"model.pooling": 20}).study

The file has the sections of `perf.dlrm.Study`, and `stated`, `assumed`, `sweep` and `paper` as an
experiment has. No torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from flux_megatron.lab.perf import dlrm_step
from flux_megatron.lab.perf.dlrm import Study, broken
from flux_megatron.lab.perf.dlrm_step import ARMS, Arm, Prediction
from flux_megatron.launch import experiment, schema
from flux_megatron.launch.errors import ExperimentError
from flux_megatron.launch.inheritance import Merged, merge

# What the range is of: all combinations of their values in `sweep`.
JOINT = (
    "network.bandwidth_gbps", "network.latency_us", "model.pooling", "step.global_batch",
)  # fmt: skip


@dataclass(frozen=True)
class StudyFile:
    """A study as its file has it; `stated`, `assumed`, `sweep` and `paper` as `Experiment` has."""

    name: str
    study: Study
    stated: dict[str, str]
    assumed: dict[str, str]
    sweep: dict[str, list[Any]]
    paper: dict[str, Any]


@dataclass(frozen=True)
class Alternative:
    """The arms with other values; without any where the rules refuse them."""

    values: dict[str, Any]
    arms: dict[Arm, Prediction]
    refused: str = ""


def is_study(name_or_path: str) -> bool:
    """Whether the file is one of these. `ExperimentError` as `experiment.load`."""
    merged = Merged(experiment.find(name_or_path)[1])
    return bool(merged.tree.get("program") == experiment.STUDY_PROGRAM)


def load(name_or_path: str, overrides: Mapping[str, Any] | None = None) -> StudyFile:
    """`ExperimentError` lists all that is wrong: key and rule of each."""
    name, path = experiment.find(name_or_path)
    merged = Merged(path, overrides)
    tree = {key: value for key, value in merged.tree.items() if key != "program"}
    merge(tree, {"model.name": path.stem})
    study, wrong = schema.build(Study, tree)
    wrong += [*(broken(study) if study else ()), *merged.wrong]
    wrong += [one for one in merged.unexplained() if one[0] != "program"]
    if wrong or study is None:
        raise ExperimentError(name_or_path, wrong)
    return StudyFile(name, study, **merged.reasons())


def predict(study: Study, arms: Iterable[Arm] = ARMS) -> dict[Arm, Prediction]:
    return {arm: dlrm_step.predict(study, arm) for arm in arms}


def reduction(arms: Mapping[Arm, Prediction], arm: Arm) -> float:
    """By which share of the unfused step an arm's is shorter."""
    return 1 - arms[arm].step_us / arms["unfused"].step_us


def one_at_a_time(found: StudyFile) -> list[Alternative]:
    """Every other value of what is assumed."""
    current = _flat(found.study)
    return [
        changed(found.study, {key: value})
        for key, values in found.sweep.items()
        for value in values
        if _plain(current[key]) != _plain(value)
    ]


def jointly(found: StudyFile) -> list[Alternative]:
    """All combinations of network, pooling and batch."""
    keys = [key for key in JOINT if key in found.sweep]
    combinations = product(*(found.sweep[key] for key in keys))
    return [changed(found.study, dict(zip(keys, one, strict=True))) for one in combinations]


def changed(study: Study, values: Mapping[str, Any]) -> Alternative:
    """The arms of a study with other values, by dotted keys."""
    for key, value in values.items():
        section, name = key.split(".")
        value = tuple(value) if isinstance(value, list) else value
        part = dataclasses.replace(getattr(study, section), **{name: value})
        if name == "shape" and len(value) == 1:
            part = dataclasses.replace(part, kind="switch")
        study = dataclasses.replace(study, **{section: part})
    for _, rule in broken(study):
        return Alternative(dict(values), {}, rule)
    return Alternative(dict(values), predict(study))


def _flat(study: Study) -> dict[str, Any]:
    return {
        f"{section}.{name}": value
        for section, values in dataclasses.asdict(study).items()
        for name, value in values.items()
    }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value
