"""From the options of `flux-megatron launch` to a run that is written, submitted or running."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flux_megatron import config_files, machine, option_values
from flux_megatron.launch import experiment, run_folder, scripts, site
from flux_megatron.launch.errors import LaunchError
from flux_megatron.launch.experiment import Experiment
from flux_megatron.launch.job import trained_by
from flux_megatron.launch.run_folder import Given
from flux_megatron.launch.scripts import RunOptions
from flux_megatron.launch.workload import Arm
from flux_megatron.versions import megatron_core

INTERRUPTED = 130
ROUNDS = 2  # of several arms: A B A B, so that what drifts during a job does not fall on one arm
MOST_ROUNDS = 100  # each is a whole run of every arm, in one job


@dataclass(frozen=True)
class Prepared:
    """A launch of which nothing is written yet.

    `files` are the texts of all arms, by round and arm; `started` the names of those that this
    launch starts, such as round-1/flux, or flux where there are no rounds; `job` is the text of
    job.sbatch.
    """

    experiment: Experiment
    options: RunOptions
    given: Given
    resume: bool
    files: dict[str, dict[Arm, dict[str, str]]]
    started: list[str]
    job: str

    def shown(self) -> str:
        """All of it in print."""
        whole, run = self.experiment, self.options.run
        parts = [f"# {whole.name}: program {whole.program}, {whole.megatron_lm}"]
        if whole.program != "train" and self.options.checkout is None:
            parts.append(f"# {scripts.NO_CHECKOUT} stands for what --megatron-lm names: none given")
        for one, arms in self.files.items():
            for arm, files in arms.items():
                if (name := str(Path(one, arm))) in self.started:
                    parts.append(f"## arm {name}")
                    parts += [f"# {run / name / file}\n{text}" for file, text in files.items()]
        return "\n".join([*parts, "## job.sbatch", self.job])

    def write(self) -> Path:
        """Write the run folder, and return its job.sbatch. No run is overwritten."""
        run = self.options.run
        if self.experiment.program != "train":
            _check_checkout(self.experiment.megatron_lm, self.options.checkout)
        option_values.folder("--run-dir", run)
        if not self.resume and any(run.iterdir()):
            raise LaunchError(
                f"{run} exists and is not empty: --resume continues it, --run-dir names another"
            )
        # its nodes would read the files of two launches when they start again
        waiting = "PENDING", "CONFIGURING", "SUSPENDED"
        if self.resume and shutil.which("scontrol") and (job := trained_by(run, *waiting)):
            raise LaunchError(f"job {job} trains {run}: cancel it to resume the run")
        with option_values.writing("--run-dir", run):
            for one, arms in self.files.items():
                run_folder.write(run / one, self.experiment, self.given, arms)
            option_values.replace(run / scripts.JOB.name, scripts.JOB.read_text())
            option_values.replace(run / "job.sbatch", self.job)
        return run / "job.sbatch"

    def submit(self) -> str:
        """Write it and hand it to Slurm; the job's id."""
        if shutil.which("sbatch") is None:
            raise LaunchError("no sbatch on PATH: is this a node of a Slurm cluster?")
        command = ["sbatch", "--parsable", str(self.write())]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise LaunchError(
                f"sbatch refused {command[-1]}:\n{done.stderr.strip()}\n"
                "Correct the script and hand it to sbatch, or launch again with --resume."
            )
        return done.stdout.strip().split(";")[0]

    def run_here(self, log: Callable[[str], None]) -> int:
        """Write it and run the arms one after the other; the first exit code that is not 0, of the
        doctor or of an arm: later arms do not run. A CPU has any number of ranks.

        An allocation of Slurm around us is not looked at: its nodes are not started here.
        """
        cluster, found = self.experiment.cluster, machine.gpu_count()
        if cluster.gpu != "cpu" and found < cluster.gpus:
            nodes = f"an experiment of {cluster.nodes} nodes is for --submit"
            more = f": {nodes}" if cluster.nodes > 1 else ""
            raise LaunchError(f"{cluster.gpus} GPUs needed on this machine, {found} found{more}")
        self.write()
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
        for name in self.started:
            folder = self.options.run / name
            if (folder / "done").exists():
                log(f"arm {name}: done")
                continue
            start = "resume" if self.resume and (folder / "started").exists() else "start"
            log(f"arm {name}: {start}")
            for mode in ("doctor", start):
                if mode == start:
                    (folder / "started").touch()
                script = ["bash", str(folder / "command.sh"), mode]
                if code := _wait(subprocess.Popen(script, env=environment)):
                    log(f"arm {name}: {mode} ended with code {code}")
                    return code
            (folder / "done").touch()
        return 0


def _wait(process: subprocess.Popen[bytes]) -> int:
    """The exit code, 130 after Ctrl-C, which reaches the ranks too: torchrun ends them, and they
    are waited for, whatever code they end with.
    """
    interrupted = False
    while True:
        try:
            code = process.wait()
        except KeyboardInterrupt:  # noqa: PERF203, it is no hot loop
            interrupted = True
        else:
            return INTERRUPTED if interrupted else code


def prepare(
    name: str,
    run: Path | None = None,
    arms: Sequence[str] = (),
    overrides: Sequence[str] = (),
    checkout: Path | None = None,
    data: Sequence[str] = (),
    save_interval: int | None = None,
    site_file: Path | None = None,
    sbatch_options: Sequence[str] = (),
    variables: Sequence[str] = (),
    rounds: int | None = None,
    resume: bool = False,
) -> Prepared:
    """`ExperimentError` or `LaunchError` names what cannot be launched.

    `rounds` None: those of the run that is resumed, or ROUNDS where there are several arms.
    """
    values = config_files.overrides(overrides, experiment.EXAMPLE)
    run = option_values.absolute(run or Path("runs") / experiment.find(name)[0])
    given = Given(
        checkout=option_values.absolute(checkout) if checkout else None,
        data=tuple(map(_absolute, data)),
        save_interval=save_interval,
        site=site_file.absolute() if site_file else None,
        env=tuple(variables),
    )
    if resume:
        first, rounds = _resumed(run, rounds)
        kept = experiment.load(name, values, tuple(run_folder.read(first).arms))
        run_folder.refuse_other(first, kept)
        given = run_folder.resumed(first, given)
    else:
        kept = experiment.load(name, values, arms)
        if rounds is not None and rounds > MOST_ROUNDS:
            why = "each trains every arm anew, in one job"
            raise LaunchError(f"--alternate {rounds} given, at most {MOST_ROUNDS} expected: {why}")
        rounds = (ROUNDS if len(kept.arms) > 1 else 0) if rounds is None else rounds
    if (save_interval := given.save_interval) is None:  # none of Megatron's, which may be terabytes
        steps = next(iter(kept.arms.values())).training.steps
        save_interval = max(1, steps // 10) if kept.program == "train" else 0
    options = RunOptions(
        run=run,
        site=site.load(given.site, sbatch_options, given.env),
        checkout=given.checkout,
        data=given.data,
        save_interval=save_interval,
    )
    _check_options(kept, options)
    files = {
        one: {arm: scripts.files(kept, arm, options, run / one / arm) for arm in kept.arms}
        for one in [f"round-{number}" for number in range(1, rounds + 1)] or [""]
    }
    these = experiment.chosen(arms, [*kept.arms])
    started = [str(Path(one, arm)) for one in files for arm in these]
    job = scripts.job(kept, options, started, resume)
    prepared = Prepared(kept, options, given, resume, files, started, job)
    _check_text(prepared.shown())
    return prepared


def _check_options(kept: Experiment, options: RunOptions) -> None:
    """`LaunchError` for a site without an image of an arm, whose options do not fit the experiment,
    and for a folder of text that is not there, as a container may have another one, or not alone.
    """
    container = options.site.container
    if missing := [arm for arm in kept.arms if container and not container.image_of(arm)]:
        raise LaunchError(
            f"container.image: none given, and none in container.images for {missing}"
        )
    absent = [path for path in options.data if not os.path.isdir(path)]
    if kept.program == "train" and absent and container is None:
        raise LaunchError(f"--data-path {absent[0]} given, a folder of text files expected")
    if kept.program == "train" and len(options.data) > 1:
        given = " ".join(f"--data-path {path}" for path in options.data)
        raise LaunchError(f"{given} given, one folder of text files expected for program train")
    scripts.check_options(options.site, kept.cluster)


def _check_text(text: str) -> None:
    """`LaunchError` for what cannot be written: the bytes of an option that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        line = text[: error.end].splitlines()[-1].strip()
        raise LaunchError(f"{line!r} given, UTF-8 expected") from None


def _check_checkout(release: str, checkout: Path | None) -> None:
    """`LaunchError` where there is none, `BadInput` for one that is too old; one of another release
    is reported.
    """
    if checkout is None or not os.path.isfile(checkout / "pretrain_gpt.py"):
        found = f"{checkout} has no pretrain_gpt.py" if checkout else "none given"
        raise LaunchError(f"--megatron-lm: {found}, a checkout of {release} needed")
    megatron_core.check(checkout)
    found = megatron_core.version_in(checkout) or "of an unknown version"
    if found not in release:
        print(f"{checkout} is {found}, the experiment was written for {release}", file=sys.stderr)


def _resumed(run: Path, rounds: int | None) -> tuple[Path, int]:
    """The folder of the run, or of its first round, and how many rounds it has."""
    folders = run_folder.of_run(run)
    found = 0 if folders == [run] else len(folders)
    if rounds not in (None, found):
        raise LaunchError(f"--alternate {rounds} given, {run} has {found or 'no'} rounds")
    return folders[0], found


def _absolute(argument: str) -> str:
    """Ranks run in another folder. Among the prefixes of data sets may stand their weights."""
    there = os.path.exists(argument) or os.path.exists(f"{argument}.idx")
    return str(Path(argument).resolve()) if there else argument
