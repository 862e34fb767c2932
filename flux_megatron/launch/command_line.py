"""What the nodes run for an arm: RUN/ARM/command.sh, which starts its ranks through torchrun."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2

from flux_megatron.launch import (
    environment,
    megatron_arguments,
    parser_signature,
    train_arguments,
)
from flux_megatron.launch.experiment import Experiment
from flux_megatron.launch.site import Site
from flux_megatron.launch.workload import Arm, Cluster, Workload

PREFLIGHT_S = 300  # after which a node that is silent is unfit


@dataclass(frozen=True)
class RunOptions:
    """What a launch adds to an experiment.

    `run` is the run's folder, `checkout` that of Megatron-LM. `data` is a folder of text for
    program train, else prefixes of indexed data sets. `save_interval` 0: no checkpoints.
    """

    run: Path
    site: Site
    checkout: Path | None = None
    data: tuple[str, ...] = ()
    save_interval: int = 0

    def folders(self) -> list[Path]:
        """What a rank reads and writes, whatever container it is in."""
        data = [path for path in map(Path, self.data) if path.is_absolute()]
        data = [path if path.is_dir() else path.parent for path in data]
        return [self.run, *([self.checkout] if self.checkout else []), *data]


@dataclass(frozen=True)
class Command:
    """An arm as its nodes run it, in a round of that `name`: round-1/flux, or flux without rounds.

    `program` follows torchrun's own options, and `on_resume` the program's when it goes on from a
    checkpoint. `progress` is a file, below `folder`, that changes with every checkpoint. The output
    of rank `shown_rank` of a node is on the terminal too. `preflight`: what a node is held against.
    `folders`: what a container has to show. `files` are written into `folder` first.
    """

    arm: Arm
    name: str
    workload: Workload
    folder: Path
    site: Site
    environment: dict[str, str]
    preflight: list[str]
    folders: list[Path]
    doctor: list[str]
    program: list[str]
    arguments: list[str]
    on_resume: list[str]
    directory: Path
    progress: str
    shown_rank: str
    files: dict[str, str] = field(default_factory=dict)

    def script(self) -> str:
        """The text of command.sh."""
        return render("command.sh.j2", command=self, preflight_s=PREFLIGHT_S)


def of(experiment: Experiment, arm: Arm, options: RunOptions, in_round: str = "") -> Command:
    """The command of one arm, in a round of that name where arms alternate."""
    workload, name = experiment.arms[arm], str(Path(in_round, arm))
    make = _train if experiment.program == "train" else _pretrain_gpt
    return Command(
        arm=arm,
        name=name,
        workload=workload,
        folder=options.run / name,
        site=options.site,
        environment=environment.variables(workload, options.run) | options.site.environment,
        preflight=_preflight(workload.cluster),
        folders=options.folders(),
        **make(experiment, workload, options, options.run / name),
    )


def _train(
    experiment: Experiment, workload: Workload, options: RunOptions, folder: Path
) -> dict[str, Any]:
    data = Path(options.data[0]) if options.data else None
    config = train_arguments.render(workload, data=data, save_interval=options.save_interval)
    return {
        "doctor": _doctor(workload.cluster),
        "program": ["-m", "flux_megatron.cli", "train"],
        "arguments": ["--config", str(folder / "train.yaml"), "--out", str(folder / "train")],
        "on_resume": ["--resume"],
        "directory": folder,
        "progress": "train/checkpoints/latest",
        "shown_rank": "0",
        "files": {"train.yaml": config},
    }


def _pretrain_gpt(
    experiment: Experiment, workload: Workload, options: RunOptions, folder: Path
) -> dict[str, Any]:
    checkout = options.checkout or Path("Megatron-LM")
    arguments = megatron_arguments.render(
        workload,
        data=options.data,
        cache=folder / "data",
        save=folder / "checkpoints",
        save_interval=options.save_interval,
    )
    arguments += experiment.extra_arguments[workload.arm]
    program, needed = [str(checkout / "pretrain_gpt.py")], []
    if megatron_arguments.needs_bootstrap(workload):
        device = ["--device", "cpu"] if workload.cluster.gpu == "cpu" else []
        program = ["-m", "flux_megatron.launch", *device, *program]
    else:  # Megatron's own layers cannot be built without these
        if "transformer_engine" in arguments:
            needed += ["--need", "transformer_engine"]
        if "--no-gradient-accumulation-fusion" not in arguments:
            needed += ["--need", "apex"]
    resume = megatron_arguments.resume(folder / "checkpoints") if options.save_interval else []
    return {
        "doctor": [*_doctor(workload.cluster), "--megatron-lm", str(checkout), *needed],
        "program": program,
        "arguments": arguments,
        "on_resume": resume,
        "directory": checkout,
        "progress": "checkpoints/latest_checkpointed_iteration.txt",
        "shown_rank": "$((ranks - 1))",  # Megatron logs on the last rank of all
    }


def _doctor(cluster: Cluster) -> list[str]:
    """What `flux-megatron doctor` is to expect of a node."""
    return ["--gpus", str(0 if cluster.gpu == "cpu" else cluster.gpus_per_node), "--quiet"]


def _preflight(cluster: Cluster) -> list[str]:
    """What `python -m flux_megatron.preflight` is to hold a node against."""
    given = {"--allreduce-gbps": cluster.health.allreduce_gbps, "--sm-mhz": cluster.health.sm_mhz}
    least = [text for name, bound in given.items() if bound for text in (name, f"{bound:g}")]
    return ["--gpus", str(cluster.gpus_per_node), "--link", cluster.link.kind, *least]


def render(template: str, **values: object) -> str:
    """A template of this package with `values`; its filters `sh` and `lines` quote for bash."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"sh": quoted, "lines": option_lines}
    return environment.get_template(template).render(**values)


def quoted(arguments: str | Path | Sequence[str]) -> str:
    return shlex.join([str(arguments)] if isinstance(arguments, str | Path) else arguments)


def option_lines(arguments: Sequence[str]) -> list[str]:
    """Each option with its values as one line for bash."""
    return [shlex.join(option) for option in parser_signature.options(arguments)]
