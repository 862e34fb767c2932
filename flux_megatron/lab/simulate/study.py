"""Studies of a DLRM on many nodes: their YAML, what is predicted of them, and its tables.

    load("study/dlrm-128-nodes", {"model.pooling": 20}).study

The file has the sections of `perf.dlrm.Study`, and `stated`, `assumed`, `sweep` and `paper` as an
experiment has. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from flux_megatron.config_files import flat, merge
from flux_megatron.lab.perf import dlrm
from flux_megatron.lab.perf.dlrm import ARMS, Arm, Prediction, Study
from flux_megatron.lab.simulate import tables
from flux_megatron.lab.simulate.predictions import Alternative
from flux_megatron.launch import experiment, schema
from flux_megatron.launch.errors import ExperimentError, Rule
from flux_megatron.launch.inheritance import Merged, Tree

if TYPE_CHECKING:
    from rich.table import Table

NEAR = (0.19, 0.23)  # of the study's figure, about 21 %
FUSED = ARMS[1:]
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
    study, wrong = _built(tree)
    wrong += [*merged.wrong, *(one for one in merged.unexplained() if one[0] != "program")]
    if wrong or study is None:
        raise ExperimentError(name_or_path, wrong)
    return StudyFile(name, tree, study, **merged.reasons())


def _built(tree: Tree) -> tuple[Study | None, list[Rule]]:
    study, wrong = schema.build(Study, tree)
    return study, [*wrong, *(dlrm.broken(study) if study else ())]


def predict(study: Study, arms: Iterable[Arm] = ARMS) -> dict[Arm, Prediction]:
    return {arm: dlrm.predict(study, arm) for arm in arms}


def reduction(arms: Mapping[Arm, Prediction], arm: Arm) -> float:
    """By which share of the unfused step an arm's is shorter."""
    return 1 - arms[arm].step_us / arms["unfused"].step_us


def one_at_a_time(found: StudyFile) -> list[Alternative]:
    current = flat(found.tree)
    return [
        changed(found, {key: value})
        for key, values in found.sweep.items()
        for value in values
        if current[key] != value
    ]


def jointly(found: StudyFile) -> list[Alternative]:
    keys = [key for key in JOINT if key in found.sweep]
    combinations = product(*(found.sweep[key] for key in keys))
    return [changed(found, dict(zip(keys, one, strict=True))) for one in combinations]


def changed(found: StudyFile, values: dict[str, Any]) -> Alternative:
    """The arms with other values, by dotted keys."""
    study, wrong = _built(merge(dict(found.tree), values))
    if study is None or wrong:
        return Alternative(values, {}, wrong[0][1])
    return Alternative(values, predict(study))


def shown(found: StudyFile, swept: bool) -> Iterator[str | Table]:
    network, arms = found.study.network, predict(found.study)
    yield (
        f"{found.name}: {network.nodes} x {found.study.gpu.name}, {network.kind} "
        f"{' x '.join(map(str, network.shape))}, batch {found.study.step.global_batch}"
    )
    yield tables.parts(arms)
    yield _reductions(found, arms)
    if swept:
        yield tables.ONE_AT_A_TIME
        tried = one_at_a_time(found)
        yield tables.others("unfused", arms, tried, "shorter by", lambda arm, of: _share(of, arm))
        yield "\nAll combinations of bandwidth, latency, pooling and batch"
        yield _ranges(found)
    if "section" in found.paper:
        yield f"The paper's figure: {found.paper['section']}."
    yield "Assumed:"
    for key, why in found.assumed.items():
        yield f"  {key}: {why}"
    yield "How far to trust it: docs/reference/cost_model.md."


def _share(arms: Mapping[Arm, Prediction], arm: Arm) -> str:
    return f"{reduction(arms, arm):.1%}"


def _reductions(found: StudyFile, arms: Mapping[Arm, Prediction]) -> Table:
    """The paper's figure is for its own arms."""
    from rich.table import Table

    table = Table("arm", "step, ms", "shorter by", "the paper's")
    paper = str(found.paper.get("reduction", ""))
    for arm, step in arms.items():
        cells = ("", "") if arm == "unfused" else (_share(arms, arm), paper * (arm != "ours"))
        table.add_row(arm, f"{step.step_us / 1e3:.1f}", *cells)
    return table


def _ranges(found: StudyFile) -> Table:
    from rich.table import Table

    table = Table("arm", "combinations", "shorter by", "by 19 to 23 %")
    tried = [one.steps for one in jointly(found) if one.steps]
    for arm in FUSED if tried else ():
        shares = [reduction(arms, arm) for arms in tried]
        near = sum(NEAR[0] <= share <= NEAR[1] for share in shares)
        table.add_row(arm, str(len(shares)), f"{min(shares):.1%} to {max(shares):.1%}", f"{near}")
    return table


def plain(found: StudyFile, swept: bool) -> dict[str, Any]:
    """All of it in the types of JSON; times in microseconds."""
    arms = predict(found.study)
    tried = [*one_at_a_time(found), *jointly(found)] if swept else []
    return {
        "study": found.name,
        "values": asdict(found.study),
        "stated": found.stated,
        "assumed": found.assumed,
        "paper": found.paper,
        "arms": {arm: asdict(one) for arm, one in arms.items()},
        "reductions": {arm: reduction(arms, arm) for arm in FUSED},
        "alternatives": [{"values": one.values, **tables.figures(one)} for one in tried],
    }
