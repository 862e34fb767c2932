"""An experiment: its arms, checked, and where each of its values is from.

    load("paper/gpt3-175b_a100-pcie", {"training.micro_batch": 1}).arms["flux"]

docs/cluster.md has the format. No torch: experiments are read where they are submitted.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flux_megatron import config_files
from flux_megatron.launch import inheritance
from flux_megatron.launch.arm_builder import ArmBuilder
from flux_megatron.launch.errors import ErrorDetail, ExperimentError
from flux_megatron.launch.inheritance import Merged, Source, Value, covers
from flux_megatron.launch.schema import Program
from flux_megatron.launch.workload import Arm, Workload

STUDY_PROGRAM = "dlrm"  # of a study, which `flux-megatron simulate` reads


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
    """The experiments we ship, by their paths below configs/experiments; `base*` are only bases."""
    folder = inheritance.configs() / "experiments"
    files = (file for file in folder.rglob("*.yaml") if not file.stem.startswith("base"))
    return sorted(str(file.relative_to(folder).with_suffix("")) for file in files)


def load(name_or_path: str, overrides: Mapping[str, Any] | None = None) -> Experiment:
    """The experiment of that name, or of a YAML file, with dotted `overrides`.

    `ExperimentError` lists all that is wrong: file, key and rule of each.
    """
    name, file = find(name_or_path)
    reader = inheritance.Reader()
    merged = reader.read(file, inheritance.SHIPPED)
    program = merged.values.get("program")
    if program and program.value == STUDY_PROGRAM:
        rule = f"{STUDY_PROGRAM} given: a study, which `flux-megatron simulate` alone takes"
        raise ExperimentError([ErrorDetail(inheritance.shown(file), "program", rule)])
    if overrides:
        reader.override(merged, overrides)
    return _checked(name, file, merged, reader.errors)


def parse_override(text: str) -> tuple[str, Any]:
    """`training.micro_batch=2` -> ("training.micro_batch", 2), the value read as YAML."""
    try:
        return config_files.parse_override(text, example="training.micro_batch=2")
    except ValueError as error:
        raise ExperimentError([ErrorDetail("--set", "", str(error))]) from None


def studies() -> list[str]:
    """What is simulated alone, as study/dlrm-128-nodes: files of configs/studies."""
    files = (inheritance.configs() / "studies").glob("*.yaml")
    return sorted(f"study/{file.stem}" for file in files)


def find(name_or_path: str) -> tuple[str, Path]:
    """(name, file). `ExperimentError` for a name of none that we ship."""
    if name_or_path.endswith((".yaml", ".yml")):
        return Path(name_or_path).stem, Path(name_or_path)
    known = [*names(), *studies()]
    if name_or_path not in known:
        near = difflib.get_close_matches(name_or_path, known, n=1)
        rule = f"no such experiment; did you mean {near[0]}?" if near else f"known: {known}"
        raise ExperimentError([ErrorDetail(name_or_path, "", rule)])
    if name_or_path.startswith("study/"):
        return name_or_path, inheritance.configs() / "studies" / f"{Path(name_or_path).name}.yaml"
    return name_or_path, inheritance.configs() / "experiments" / f"{name_or_path}.yaml"


def _checked(name: str, file: Path, merged: Merged, errors: list[ErrorDetail]) -> Experiment:
    builder = ArmBuilder(merged.values, inheritance.shown(file))
    if not builder.errors:
        builder.check_memory()
    errors = [*errors, *builder.errors]
    sources, unexplained = sources_of(builder.scalars(), merged)
    wrong = {error.key for error in errors}
    errors += [error for error in unexplained if error.key not in wrong]
    for value in merged.sweep.values():
        errors += wrong_sweep(value, sources.get(value.key))
    if errors or builder.head is None:
        raise ExperimentError(errors)
    return Experiment(
        name=name,
        file=file,
        program=builder.head.program,
        megatron_lm=builder.head.megatron_lm,
        arms=builder.arms,
        extra_arguments={arm: builder.arguments(arm) for arm in builder.arms},
        stated={key: source.text for key, source in sources.items() if source.kind == "stated"},
        assumed={key: source.text for key, source in sources.items() if source.kind == "assumed"},
        sweep={key: value.value for key, value in merged.sweep.items()},
        paper=merged.paper,
    )


def sources_of(
    scalars: Iterable[str], merged: Merged
) -> tuple[dict[str, Source], list[ErrorDetail]]:
    """The source of each scalar: that of the longest key which covers it.

    A file that sets a value gives its own reason: that of its base is of another value.
    """
    found: dict[str, Source] = {}
    errors: list[ErrorDetail] = []
    unused = dict(merged.sources)
    for key in scalars:
        value = merged.values.get(key)
        covering = [source for source in merged.sources.values() if covers(source.key, key)]
        for source in covering:
            unused.pop(source.key, None)
        fresh = [source for source in covering if not value or source.order >= value.order]
        if fresh:
            found[key] = max(fresh, key=lambda source: len(source.key))
        else:
            old = f" here; what {covering[0].file} says is of another value" if covering else ""
            where = value.file if value else ""
            errors.append(ErrorDetail(where, key, f"neither stated nor assumed{old}"))
    errors += [
        ErrorDetail(source.file, f"{source.kind}.{key}", "there is no such value")
        for key, source in unused.items()
    ]
    return found, errors


def wrong_sweep(sweep: Value, source: Source | None) -> Iterator[ErrorDetail]:
    """What is assumed may be swept; alternatives that break rules are refused when loaded."""
    key = f"sweep.{sweep.key}"
    if source is None:
        yield ErrorDetail(sweep.file, key, "there is no such value")
    elif source.kind == "stated":
        yield ErrorDetail(
            sweep.file, key, f"{source.file} states it: only what is assumed is swept"
        )
    if not isinstance(sweep.value, list) or not sweep.value:
        yield ErrorDetail(sweep.file, key, f"a list expected, {sweep.value!r} given")
