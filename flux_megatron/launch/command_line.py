"""What the nodes run for an arm: RUN/ARM/command.sh, which starts its ranks through torchrun."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import jinja2

from flux_megatron.launch import (
    environment,
    megatron_arguments,
    parser_signature,
    train_arguments,
)
from flux_megatron.launch.experiment import Experiment
from flux_megatron.launch.site import Site
from flux_megatron.launch.workload import Arm, Workload

PREFLIGHT_S = 300  # after which a node that is silent is unfit


@dataclass(frozen=True)
class RunOptions:
    """What a launch adds to an experiment.

    `run` is the run's folder, `round` the name of one below it where arms alternate, `checkout`
    that of Megatron-LM. `data` is a folder of text for program train, else prefixes of indexed data
    sets. `save_interval` 0: no checkpoints.
    """

    run: Path
    site: Site
    checkout: Path | None = None
    data: tuple[str, ...] = ()
    save_interval: int = 0
    round: str = ""

    def name(self, arm: Arm) -> str:
        """Of an arm's folder in the run's."""
        return str(Path(self.round, arm))

    def folder(self, arm: Arm) -> Path:
        return self.run / self.name(arm)

    def folders(self) -> list[Path]:
        """What a rank reads and writes, whatever container it is in."""
        data = [path for path in map(Path, self.data) if path.is_absolute()]
        data = [path if path.is_dir() else path.parent for path in data]
        return [self.run, *([self.checkout] if self.checkout else []), *data]


@dataclass(frozen=True)
class Command:
    """An arm as its nodes run it, in a round of that `name`: round-1/flux, or flux without rounds.

    `program` follows torchrun's own options, and `on_resume` the program's when it goes on from a
    checkpoint. `progress` is a file, below `folder`, that changes with every checkpoint. `files`
    are written into `folder` first. `folders`: what a container has to show. `preflight`: what a
    node is held against, None for one without GPUs.
    """

    arm: Arm
    name: str
    workload: Workload
    folder: Path
    site: Site
    program: list[str]
    arguments: list[str]
    on_resume: list[str]
    environment: dict[str, str]
    directory: Path
    progress: str
    shown_rank: Literal["first", "last"]  # of a node: its output is also on the terminal
    doctor: list[str]
    preflight: list[str] | None
    folders: list[Path]
    files: dict[str, str] = field(default_factory=dict)

    def script(self) -> str:
        """The text of command.sh."""
        return render("command.sh.j2", command=self, preflight_s=PREFLIGHT_S)

    def torchrun(self) -> str:
        """The line that starts the ranks, as in command.sh, without the arguments."""
        return " ".join([*render("torchrun.j2", command=self).split(), shlex.join(self.program)])


def of(experiment: Experiment, arm: Arm, options: RunOptions) -> Command:
    """The command of one arm."""
    make = _train if experiment.program == "train" else _pretrain_gpt
    return make(experiment, arm, options)


def _train(experiment: Experiment, arm: Arm, options: RunOptions) -> Command:
    workload, folder = experiment.arms[arm], options.folder(arm)
    data = Path(options.data[0]) if options.data else None
    config = train_arguments.render(workload, data=data, save_interval=options.save_interval)
    return Command(
        arm=arm,
        name=options.name(arm),
        workload=workload,
        folder=folder,
        site=options.site,
        program=["-m", "flux_megatron.cli", "train"],
        arguments=["--config", str(folder / "train.yaml"), "--out", str(folder / "train")],
        on_resume=["--resume"],
        environment=environment.variables(workload, options.run) | options.site.environment,
        directory=folder,
        progress="train/checkpoints/latest",
        shown_rank="first",
        doctor=_doctor(workload),
        preflight=_preflight(workload),
        folders=options.folders(),
        files={"train.yaml": config},
    )


def _pretrain_gpt(experiment: Experiment, arm: Arm, options: RunOptions) -> Command:
    workload, folder = experiment.arms[arm], options.folder(arm)
    checkout = options.checkout or Path("Megatron-LM")
    program = [str(checkout / "pretrain_gpt.py")]
    if megatron_arguments.needs_bootstrap(workload):
        device = ["--device", "cpu"] if workload.cluster.gpu == "cpu" else []
        program = ["-m", "flux_megatron.launch", *device, *program]
    arguments = megatron_arguments.render(
        workload,
        data=options.data,
        cache=folder / "data",
        save=folder / "checkpoints",
        save_interval=options.save_interval,
    )
    arguments += experiment.extra_arguments[arm]
    resume = megatron_arguments.resume(folder / "checkpoints") if options.save_interval else []
    return Command(
        arm=arm,
        name=options.name(arm),
        workload=workload,
        folder=folder,
        site=options.site,
        program=program,
        arguments=arguments,
        on_resume=resume,
        environment=environment.variables(workload, options.run) | options.site.environment,
        directory=checkout,
        progress="checkpoints/latest_checkpointed_iteration.txt",
        shown_rank="last",  # Megatron logs on the last rank of all
        doctor=[*_doctor(workload), "--megatron-lm", str(checkout), *_needs(workload, arguments)],
        preflight=_preflight(workload),
        folders=options.folders(),
    )


def _doctor(workload: Workload) -> list[str]:
    """What `flux-megatron doctor` is to expect of a node."""
    gpus = 0 if workload.cluster.gpu == "cpu" else workload.cluster.gpus_per_node
    return ["--gpus", str(gpus), "--quiet"]


def _preflight(workload: Workload) -> list[str] | None:
    """What `python -m flux_megatron.preflight` is to hold a node against."""
    cluster = workload.cluster
    if cluster.gpu == "cpu":
        return None
    given = {"--allreduce-gbps": cluster.health.allreduce_gbps, "--sm-mhz": cluster.health.sm_mhz}
    least = [text for name, bound in given.items() if bound for text in (name, f"{bound:g}")]
    return ["--gpus", str(cluster.gpus_per_node), "--link", cluster.link.kind, *least]


def _needs(workload: Workload, arguments: list[str]) -> list[str]:
    """Packages without which Megatron's own layers cannot be built."""
    if megatron_arguments.needs_bootstrap(workload):
        return []
    te = ["--need", "transformer_engine"] if "transformer_engine" in arguments else []
    fusion = "--no-gradient-accumulation-fusion" not in arguments
    return [*te, *(["--need", "apex"] if fusion else [])]


def render(template: str, **values: object) -> str:
    """A template of this package with `values`; its filters `sh` and `lines` quote for bash."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"sh": _quoted, "lines": option_lines}
    return environment.get_template(template).render(**values)


def _quoted(arguments: str | Path | Sequence[str]) -> str:
    if isinstance(arguments, str | Path):
        return shlex.quote(str(arguments))
    return shlex.join(arguments)


def option_lines(arguments: Sequence[str]) -> list[str]:
    """Each option with its values as one line for bash."""
    return [shlex.join(option) for option in parser_signature.options(arguments)]
