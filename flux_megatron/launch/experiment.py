"""An experiment: its arms, checked, and where each of its values is from.

    load("paper/gpt3-175b_a100-pcie", {"training.micro_batch": 1}).arms["flux"]

docs/cluster.md has the format. No torch: experiments are read where they are submitted.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from flux_megatron import config_files
from flux_megatron.config_files import configs, flat
from flux_megatron.launch import rules, schema
from flux_megatron.launch.errors import ErrorDetail, ExperimentError
from flux_megatron.launch.inheritance import Merged, Value, covers, put, shown
from flux_megatron.launch.schema import Program
from flux_megatron.launch.workload import Arm, Workload

STUDY_PROGRAM = "dlrm"  # of a study, which `flux-megatron simulate` reads
ARMS: tuple[Arm, ...] = get_args(Arm)
SECTIONS = ("model", "cluster", "parallel", "training")
NAMES = ("model.name", "cluster.name", "arm")  # need no source
# Where a file leaves these out there is nothing to explain.
OPTIONAL = ("cluster.health", "cluster.environment", "model.moe", "parallel.ep")
NO_VALUE = "there is no such value"


@dataclass(frozen=True)
class Experiment:
    """`arms` differ in what `arms:` says and in `Workload.arm`.

    Every scalar is a key of either `stated`, with its source, or `assumed`, with the reason; those
    of an arm alone as `arms.flux.training.recompute`. `sweep` has other values for assumed ones.
    `extra_arguments` are Megatron's, beside those that follow from the workload. `paper` is the
    figure that a result is to be put beside.
    """

    name: str
    file: Path
    program: Program
    megatron_lm: str
    arms: dict[Arm, Workload]
    extra_arguments: dict[Arm, list[str]]
    stated: dict[str, str]
    assumed: dict[str, str]
    sweep: dict[str, list[Any]]
    paper: dict[str, Any]


def names() -> list[str]:
    """The experiments we ship."""
    return sorted(name for name in _shipped() if not name.startswith("study/"))


def _shipped() -> dict[str, Path]:
    """Files by their paths below configs/experiments, where `base*` are only bases, and what is
    simulated alone, as study/dlrm-128-nodes.
    """
    root = configs() / "experiments"
    files = [file for file in root.rglob("*.yaml") if not file.stem.startswith("base")]
    found = {str(file.relative_to(root).with_suffix("")): file for file in files}
    studies = (configs() / "studies").glob("*.yaml")
    return found | {f"study/{file.stem}": file for file in studies}


def load(name_or_path: str, overrides: Mapping[str, Any] | None = None) -> Experiment:
    """The experiment of that name, or of a YAML file, with dotted `overrides`.

    `ExperimentError` lists all that is wrong: file, key and rule of each.
    """
    name, file = find(name_or_path)
    merged = Merged()
    merged.read(file)
    if is_study(merged):
        rule = f"{STUDY_PROGRAM} given: a study, which `flux-megatron simulate` alone takes"
        raise ExperimentError([ErrorDetail(shown(file), "program", rule)])
    merged.override(overrides or {})
    return _checked(name, file, merged)


def is_study(merged: Merged) -> bool:
    program = merged.values.get("program")
    return program is not None and program.value == STUDY_PROGRAM


def parse_override(text: str) -> tuple[str, Any]:
    """`training.micro_batch=2` -> ("training.micro_batch", 2), the value read as YAML."""
    try:
        return config_files.parse_override(text, example="training.micro_batch=2")
    except ValueError as error:
        raise ExperimentError([ErrorDetail("--set", "", str(error))]) from None


def find(name_or_path: str) -> tuple[str, Path]:
    """(name, file). `ExperimentError` for a name of none that we ship."""
    if name_or_path.endswith((".yaml", ".yml")):
        return Path(name_or_path).stem, Path(name_or_path)
    known = _shipped()
    if name_or_path not in known:
        near = difflib.get_close_matches(name_or_path, known, n=1)
        rule = f"no such experiment; did you mean {near[0]}?" if near else f"known: {sorted(known)}"
        raise ExperimentError([ErrorDetail(name_or_path, "", rule)])
    return name_or_path, known[name_or_path]


def _checked(name: str, file: Path, merged: Merged) -> Experiment:
    written, errors = schema.build(schema.File, merged.values, shown(file))
    arms, wrong = _arms(merged.values, shown(file))
    errors = [*merged.errors, *errors, *wrong]
    arguments: dict[Arm, list[str]] = {}
    if written is not None:
        for arm, workload in arms.items():
            arguments[arm] = [*written.arguments, *getattr(written.arms, arm).arguments]
            broken = rules.broken(workload, written, arguments[arm])
            errors += _located(broken, arm, merged.values, shown(file))
    for arm in [] if errors else arms:
        errors += _located(rules.too_large(arms[arm]), arm, merged.values, shown(file))
    reasons, unexplained = explained(_scalars(merged.values, arms), merged)
    if wrong:  # then defaults are not known
        unexplained = [error for error in unexplained if error.rule != NO_VALUE]
    known = [error.key for error in errors]
    errors += [one for one in unexplained if not any(covers(key, one.key) for key in known)]
    if errors or written is None:
        raise ExperimentError(errors)
    release = written.megatron_lm
    return Experiment(name, file, written.program, release, arms, arguments, **reasons)


def _arms(values: Mapping[str, Value], file: str) -> tuple[dict[Arm, Workload], list[ErrorDetail]]:
    """Those that can be built: an arm's own `parallel` and `training` lie upon those of all."""
    arms: dict[Arm, Workload] = {}
    errors: list[ErrorDetail] = []
    given = [arm for arm in ARMS if any(covers(f"arms.{arm}", key) for key in values)]
    if not given:
        rule = f"none given, some of {[*ARMS]} expected, as `flux: {{}}`"
        errors.append(ErrorDetail(file, "arms", rule))
    for arm in given:
        found = {key: one for key, one in values.items() if key.split(".")[0] in SECTIONS}
        for key, one in values.items():
            own = key.removeprefix(f"arms.{arm}.")
            if own != key and own.split(".")[0] in ("parallel", "training"):
                put(found, own, one)
        found["arm"] = Value(f"arms.{arm}", arm, file)
        built, wrong = schema.build(Workload, found, file)
        errors += wrong
        if built:
            arms[arm] = built
    return arms, errors


def _located(
    broken: Iterable[rules.Rule], arm: Arm, values: Mapping[str, Value], file: str
) -> Iterator[ErrorDetail]:
    for key, rule in broken:
        at = values.get(f"arms.{arm}.{key}") or values.get(key) or Value(key, None, file)
        yield ErrorDetail(at.file, at.key, rule)


def _scalars(values: Mapping[str, Value], arms: Mapping[Arm, Workload]) -> list[str]:
    """The keys of all scalars, those that have their default too."""
    found = dict.fromkeys(key for key, value in values.items() if value.value != {})
    for workload in arms.values():
        for key in flat(asdict(workload)):
            if key in values or not any(covers(one, key) for one in OPTIONAL):
                found[key] = None
    return [key for key in found if key not in NAMES]


def explained(scalars: Iterable[str], merged: Merged) -> tuple[dict[str, Any], list[ErrorDetail]]:
    """`stated`, `assumed`, `sweep` and `paper` of an experiment, and what is wrong with them.

    A value's source is that of the longest key which covers it. A file that sets a value gives its
    own reason: that of its base is of another value. What is assumed may be swept; alternatives
    that break rules are refused when they are loaded.
    """
    found: dict[str, dict[str, str]] = {"stated": {}, "assumed": {}}
    errors: list[ErrorDetail] = []
    unused = dict(merged.sources)
    stated_by: dict[str, str] = {}
    for key in scalars:
        value = merged.values.get(key)
        covering = [source for source in merged.sources.values() if covers(source.key, key)]
        for source in covering:
            unused.pop(source.key, None)
        fresh = [source for source in covering if not value or source.order >= value.order]
        if fresh:
            source = max(fresh, key=lambda source: len(source.key))
            found[source.kind][key], stated_by[key] = source.text, source.file
        else:
            old = f" here; what {covering[0].file} says is of another value" if covering else ""
            rule = f"neither stated nor assumed{old}"
            errors.append(ErrorDetail(value.file if value else "", key, rule))
    for key, source in unused.items():
        errors.append(ErrorDetail(source.file, f"{source.kind}.{key}", NO_VALUE))
    for key, sweep in merged.sweep.items():
        wrong = []
        if key in found["stated"]:
            wrong.append(f"{stated_by[key]} states it: only what is assumed is swept")
        elif key not in found["assumed"]:
            wrong.append(NO_VALUE)
        if not isinstance(sweep.value, list) or not sweep.value:
            wrong.append(f"a list expected, {sweep.value!r} given")
        errors += [ErrorDetail(sweep.file, f"sweep.{key}", rule) for rule in wrong]
    sweeps = {key: sweep.value for key, sweep in merged.sweep.items()}
    return {**found, "sweep": sweeps, "paper": merged.paper}, errors
