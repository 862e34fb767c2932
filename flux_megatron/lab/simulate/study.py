"""Studies of a DLRM on many nodes: their YAML, and what is predicted of them.

    load("study/dlrm-128-nodes", {"model.pooling": 20}).study

The file has the sections of `perf.dlrm.Study`, and `stated`, `assumed`, `sweep` and `paper` as an
experiment has. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from flux_megatron.config_files import flat, merge
from flux_megatron.lab.perf import dlrm_step
from flux_megatron.lab.perf.dlrm import Study, broken
from flux_megatron.lab.perf.dlrm_step import ARMS, Arm, Prediction
from flux_megatron.lab.simulate.predictions import Alternative
from flux_megatron.launch import experiment, schema
from flux_megatron.launch.errors import ExperimentError, Rule
from flux_megatron.launch.inheritance import Merged, Tree

# What the range is of: all combinations of their values in `sweep`.
JOINT = (
    "network.bandwidth_gbps", "network.latency_us", "model.pooling", "step.global_batch",
)  # fmt: skip


@dataclass(frozen=True)
class StudyFile:
    """A study as its file has it; `stated`, `assumed`, `sweep` and `paper` as `Experiment` has."""

    name: str
    tree: Tree  # of the sections
    study: Study
    stated: dict[str, str]
    assumed: dict[str, str]
    sweep: dict[str, list[Any]]
    paper: dict[str, Any]


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
    study, wrong = _built(tree)
    wrong += [*merged.wrong, *(one for one in merged.unexplained() if one[0] != "program")]
    if wrong or study is None:
        raise ExperimentError(name_or_path, wrong)
    return StudyFile(name, tree, study, **merged.reasons())


def _built(tree: Tree) -> tuple[Study | None, list[Rule]]:
    study, wrong = schema.build(Study, tree)
    return study, [*wrong, *(broken(study) if study else ())]


def predict(study: Study, arms: Iterable[Arm] = ARMS) -> dict[Arm, Prediction]:
    return {arm: dlrm_step.predict(study, arm) for arm in arms}


def reduction(arms: Mapping[Arm, Prediction], arm: Arm) -> float:
    """By which share of the unfused step an arm's is shorter."""
    return 1 - arms[arm].step_us / arms["unfused"].step_us


def one_at_a_time(found: StudyFile) -> list[Alternative]:
    """Every other value of what is assumed."""
    current = flat(found.tree)
    return [
        changed(found, {key: value})
        for key, values in found.sweep.items()
        for value in values
        if current[key] != value
    ]


def jointly(found: StudyFile) -> list[Alternative]:
    """All combinations of network, pooling and batch."""
    keys = [key for key in JOINT if key in found.sweep]
    combinations = product(*(found.sweep[key] for key in keys))
    return [changed(found, dict(zip(keys, one, strict=True))) for one in combinations]


def changed(found: StudyFile, values: dict[str, Any]) -> Alternative:
    """The arms with other values, by dotted keys; of one dimension a network is a switch."""
    kind = {"network.kind": "switch"} if len(values.get("network.shape", ())) == 1 else {}
    study, wrong = _built(merge(dict(found.tree), {**values, **kind}))
    if study is None or wrong:
        return Alternative(values, {}, wrong[0][1])
    return Alternative(values, predict(study))
