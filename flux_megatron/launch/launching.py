"""From a request to a run that is written, submitted or running on this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from flux_megatron import option_values
from flux_megatron.launch import (
    command_line,
    experiment,
    local,
    parser_signature,
    run_folder,
    sbatch,
    site,
)
from flux_megatron.launch.command_line import Command, RunOptions
from flux_megatron.launch.errors import LaunchError
from flux_megatron.launch.experiment import Experiment

ROUNDS = 2  # of several arms: A B A B, so that what drifts during a job does not fall on one arm


@dataclass(frozen=True)
class Request:
    """The options of `flux-megatron launch`, as given.

    `rounds` None: those of the run that is resumed, or ROUNDS where there are several arms.
    """

    experiment: str
    run: Path | None = None
    arms: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    checkout: Path | None = None
    data: tuple[str, ...] = ()
    save_interval: int | None = None
    site: Path | None = None
    sbatch: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    resume: bool = False
    rounds: int | None = None


@dataclass(frozen=True)
class Prepared:
    """A launch of which nothing is written yet.

    `commands` are all arms of the run, or of each of its rounds in turn; `started` are those of
    them that this launch starts.
    """

    request: Request
    experiment: Experiment
    options: RunOptions
    commands: list[Command]
    started: list[Command]

    @property
    def job(self) -> str:
        """The text of job.sbatch."""
        mode = "resume" if self.request.resume else "start"
        name, run = self.experiment.name, self.options.run
        return sbatch.script(name, run, self.started, mode)

    def shown(self) -> str:
        """All of it in print."""
        whole = self.experiment
        parts = [f"# {whole.name}: program {whole.program}, {whole.megatron_lm}"]
        for command in self.started:
            texts = command.files | {"command.sh": command.script()}
            parts.append(f"## arm {command.name}")
            parts += [f"# {command.folder / name}\n{text}" for name, text in texts.items()]
        return "\n".join([*parts, "## job.sbatch", self.job])

    def write(self) -> Path:
        """Write the run folder, and return its job.sbatch. No run is overwritten."""
        run = self.options.run
        if self.experiment.program != "train":
            _check_checkout(self.experiment.megatron_lm, self.options.checkout)
        if not self.request.resume:
            run_folder.refuse_used(run)
        option_values.folder("--run-dir", run)
        how = {"command": sys.argv, "request": asdict(self.request)}
        with option_values.writing("--run-dir", run):
            for folder in dict.fromkeys(command.folder.parent for command in self.commands):
                commands = [one for one in self.commands if one.folder.parent == folder]
                run_folder.write(folder, self.experiment, commands, how)
            return run_folder.write_job(run, self.job)

    def submit(self) -> str:
        """Write it and hand it to Slurm; the job's id."""
        sbatch.check_there()
        return sbatch.submit(self.write())

    def run_here(self, log: Callable[[str], None]) -> int:
        """Write it and run the arms one after the other; the first exit code that is not 0."""
        local.check_gpus(self.started[0].workload)
        self.write()
        return local.run(self.started, self.request.resume, log)


def prepare(request: Request) -> Prepared:
    """`ExperimentError` or `LaunchError` names what cannot be launched."""
    overrides = dict(map(experiment.parse_override, request.overrides))
    loaded = experiment.load(request.experiment, overrides)
    run = option_values.absolute(request.run or Path("runs") / loaded.name)
    if request.resume:
        first, request = _resumed(request, run)
        kept = _with_arms(loaded, tuple(run_folder.read(first).arms))
        run_folder.refuse_other(first, kept)
    else:
        kept = _with_arms(loaded, request.arms or tuple(loaded.arms))
        if request.rounds is None:
            request = replace(request, rounds=ROUNDS if len(kept.arms) > 1 else 0)
    options = RunOptions(
        run=run,
        site=site.load(request.site, request.sbatch, request.environment),
        checkout=option_values.absolute(request.checkout) if request.checkout else None,
        data=tuple(map(_absolute, request.data)),
        save_interval=_save_interval(loaded, request.save_interval),
    )
    site.check_images(options.site, kept.arms)
    _check_data(kept.program, options)
    sbatch.check_options(options.site, next(iter(kept.arms.values())))
    rounds = [f"round-{number}" for number in range(1, (request.rounds or 0) + 1)] or [""]
    commands = [command_line.of(kept, arm, options, one) for one in rounds for arm in kept.arms]
    _check_arguments(kept, commands)
    wanted = _with_arms(kept, request.arms or tuple(kept.arms)).arms
    started = [command for command in commands if command.arm in wanted]
    return Prepared(request, kept, options, commands, started)


def _check_arguments(experiment: Experiment, commands: Sequence[Command]) -> None:
    """`LaunchError` unless the parser of the release that the experiment names takes them all."""
    errors: dict[str, None] = {}
    for command in commands if experiment.program != "train" else ():
        words = [*command.arguments, *command.on_resume]
        for error in parser_signature.check(words, experiment.megatron_lm):
            errors[f"arm {command.arm}: {error}"] = None
    if errors:
        raise LaunchError("\n".join(errors))


def _check_checkout(release: str, checkout: Path | None) -> None:
    """`LaunchError` where there is none; one of another release is reported."""
    if checkout is None or not (checkout / "pretrain_gpt.py").is_file():
        found = f"{checkout} has no pretrain_gpt.py" if checkout else "none given"
        raise LaunchError(f"--megatron-lm: {found}, a checkout of {release} needed")
    found = parser_signature.version(checkout)
    if found not in release:
        print(f"{checkout} is {found}, the experiment was written for {release}", file=sys.stderr)


def _resumed(request: Request, run: Path) -> tuple[Path, Request]:
    """The folder of the run, or of its first round, and the request with as many rounds."""
    folders = run_folder.of_run(run)
    found = 0 if folders == [run] else len(folders)
    if request.rounds not in (None, found):
        raise LaunchError(f"--alternate {request.rounds} given, {run} has {found or 'no'} rounds")
    return folders[0], replace(request, rounds=found)


def _with_arms(whole: Experiment, arms: tuple[str, ...]) -> Experiment:
    """The experiment with these of its arms alone."""
    if unknown := [arm for arm in arms if arm not in whole.arms]:
        raise LaunchError(f"arms {unknown} given, some of {[*whole.arms]} expected")
    return replace(
        whole,
        arms={arm: workload for arm, workload in whole.arms.items() if arm in arms},
        extra_arguments={arm: more for arm, more in whole.extra_arguments.items() if arm in arms},
    )


def _absolute(argument: str) -> str:
    """Ranks run in another folder. Among the prefixes of data sets may stand their weights."""
    there = Path(argument).exists() or Path(f"{argument}.idx").exists()
    return str(Path(argument).resolve()) if there else argument


def _check_data(program: str, options: RunOptions) -> None:
    """`LaunchError` for a folder of text that is not there; a container may have another one."""
    missing = [path for path in options.data if not Path(path).is_dir()]
    if program == "train" and missing and options.site.container is None:
        raise LaunchError(f"--data-path {missing[0]} given, a folder of text files expected")


def _save_interval(loaded: Experiment, given: int | None) -> int:
    """Ten checkpoints in a run of our own; none of Megatron's, which may be terabytes."""
    if given is not None:
        return given
    steps = next(iter(loaded.arms.values())).training.steps
    return max(1, steps // 10) if loaded.program == "train" else 0
