"""An experiment: its arms, checked, and where each of its values is from.

    load("paper/gpt3-175b_a100-pcie", {"training.micro_batch": 1}).arms["flux"]

docs/cluster.md has the format. No torch: experiments are read where they are submitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from flux_megatron import shipped
from flux_megatron.config_files import flat, merge
from flux_megatron.launch import rules, schema
from flux_megatron.launch.errors import ExperimentError, LaunchError, Rule
from flux_megatron.launch.inheritance import Merged, Tree, covers
from flux_megatron.launch.schema import Program
from flux_megatron.launch.workload import Arm, Cluster, Workload
from flux_megatron.option_values import nearest

STUDY_PROGRAM = "dlrm"  # of a study, which `flux-megatron simulate` reads
EXAMPLE = "training.micro_batch=2"  # of --set
ARMS: tuple[Arm, ...] = get_args(Arm)
SECTIONS = ("model", "cluster", "parallel", "training")  # of a workload


@dataclass(frozen=True)
class Experiment:
    """`arms` differ in what `arms:` says and in `Workload.arm`.

    Every scalar is a key of either `stated`, with its source, or `assumed`, with the reason; those
    of an arm alone as `arms.flux.training.recompute`. `sweep` has other values for assumed ones.
    `extra_arguments` are Megatron's, beside those that follow from the workload. `paper` is the
    figure that a result is to be put beside.
    """

    name: str
    program: Program
    megatron_lm: str
    arms: dict[Arm, Workload]
    extra_arguments: dict[Arm, list[str]]
    stated: dict[str, str]
    assumed: dict[str, str]
    sweep: dict[str, list[Any]]
    paper: dict[str, Any]

    @property
    def cluster(self) -> Cluster:
        """Of all arms."""
        return next(iter(self.arms.values())).cluster


def names() -> list[str]:
    """The experiments we ship."""
    return [name for name in _shipped() if not name.startswith("study/")]


def _shipped() -> dict[str, Path]:
    """Files by their paths below configs/experiments, where `base*` are only bases, and what is
    simulated alone, as study/dlrm-128-nodes.
    """
    configs = shipped.folder("configs")
    root = configs / "experiments"
    files = [file for file in root.rglob("*.yaml") if not file.stem.startswith("base")]
    found = {str(file.relative_to(root).with_suffix("")): file for file in files}
    return dict(sorted(found.items())) | {
        f"study/{one.stem}": one for one in sorted(configs.glob("studies/*.yaml"))
    }


def find(name_or_path: str) -> tuple[str, Path]:
    """(name, file). `ExperimentError` for a name of none that we ship."""
    if name_or_path.endswith((".yaml", ".yml")):
        return Path(name_or_path).stem, Path(name_or_path)
    known = _shipped()
    if name_or_path not in known:
        raise ExperimentError(name_or_path, [("", nearest(name_or_path, known))])
    return name_or_path, known[name_or_path]


def chosen(wanted: Sequence[str], there: Sequence[Arm]) -> list[Arm]:
    """Those of the arms that are wanted; all where none is named. `LaunchError` for others."""
    if unknown := [arm for arm in wanted if arm not in there]:
        raise LaunchError(f"arms {unknown} given, some of {[*there]} expected")
    return [arm for arm in there if arm in wanted or not wanted]


def load(
    name_or_path: str, overrides: Mapping[str, Any] | None = None, only: Sequence[str] = ()
) -> Experiment:
    """The experiment of that name, or of a YAML file, with dotted `overrides`; of its arms `only`
    these, or all where none is named. What forbids other arms does not matter.

    `ExperimentError` lists all that is wrong: key and rule of each.
    """
    name, path = find(name_or_path)
    merged = Merged(path, overrides)
    tree = merged.tree
    if tree.get("program") == STUDY_PROGRAM:
        rule = f"{STUDY_PROGRAM} given: a study, which `flux-megatron simulate` alone takes"
        raise ExperimentError(name_or_path, [("program", rule)])
    file, wrong = schema.build(schema.File, tree)
    if file is None:
        raise ExperimentError(name_or_path, [*wrong, *merged.wrong])
    arms: dict[Arm, Workload] = {}
    arguments: dict[Arm, list[str]] = {}
    if not file.arms:
        wrong.append(("arms", f"none given, some of {[*ARMS]} expected, as `flux: {{}}`"))
    for arm in chosen(only, [one for one in ARMS if one in file.arms]):
        own = file.arms[arm]
        parts = merge({key: tree[key] for key in SECTIONS}, {"arm": arm})
        merge(parts, {"parallel": own.parallel, "training": own.training})
        workload, found = schema.build(Workload, parts)
        if workload:
            arms[arm] = workload
            arguments[arm] = [*file.arguments, *own.arguments]
            found += rules.broken(workload, file, arguments[arm])
        wrong += [_of_arm(arm, asdict(own), one) for one in found]
    known = [key for key, _ in wrong]
    for key, rule in merged.unexplained():
        if not any(covers(one, key.removeprefix("sweep.")) for one in known):
            wrong.append((key, rule))
    wrong += merged.wrong
    if wrong:
        raise ExperimentError(name_or_path, wrong)
    return Experiment(name, file.program, file.megatron_lm, arms, arguments, **merged.reasons())


def _of_arm(arm: Arm, own: Tree, wrong: Rule) -> Rule:
    """It names what the arm has of its own as the file has it."""
    key, rule = wrong
    own_key = any(covers(key, one) for one, value in flat(own).items() if value not in ({}, []))
    return f"arms.{arm}" if key == "arm" else f"arms.{arm}.{key}" if own_key else key, rule
