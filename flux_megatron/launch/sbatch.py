"""RUN/job.sbatch: the arms of an experiment, one after the other on the same nodes."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from flux_megatron.launch.command_line import PREFLIGHT_S, Command, quoted, render
from flux_megatron.launch.errors import LaunchError
from flux_megatron.launch.site import Options, Site
from flux_megatron.launch.workload import Workload

STOP_BEFORE_S = 300  # before the time limit, for ranks to finish their step and save
TIME = "04:00:00"  # where the site names no limit
GRACE_S = 60  # for ranks that hang to write where they are


def script(name: str, run: Path, commands: Sequence[Command], mode: str) -> str:
    """The text of job.sbatch, which trains all `commands` in turn. `mode`: start or resume.

    An option of the site replaces ours.
    """
    first = commands[0]
    cpu, site = first.workload.cluster.gpu == "cpu", first.site
    return render(
        "job.sbatch.j2",
        name=name,
        options=[_option(*one) for one in _options(name, run, commands).items()],
        run=run,
        arms=[command.name for command in commands],
        mode=mode,
        progress=first.progress,
        reached={command.arm: _reached(command) for command in commands},
        preflight=site.preflight and not cpu,
        why_no_preflight="no GPUs" if cpu else "as the site says",
        preflight_s=PREFLIGHT_S,
        retries=site.retries,
        silent_s=site.silent_s,
        poll_s=max(1, min(30, site.silent_s // 4)),
        grace_s=GRACE_S,
    )


def _options(name: str, run: Path, commands: Sequence[Command]) -> Options:
    workload, site = commands[0].workload, commands[0].site
    folder = str(run).replace("%", "%%")
    options: Options = {
        "job-name": name.replace("/", "-"),
        "nodes": workload.cluster.nodes,
        "ntasks-per-node": 1,
        "time": TIME,
        "open-mode": "append",  # a job that queues up again keeps what it has said
        "output": f"{folder}/slurm-%j.out",
        "requeue": None,
    }
    if workload.cluster.gpu != "cpu":
        gpus = workload.cluster.gpus_per_node
        options |= {"gpus-per-node": gpus, "exclusive": None, "mem": 0}  # 0: all of a node's
    if commands[0].on_resume or len(commands) > 1:  # an arm that is done is progress too
        options["signal"] = f"B:USR1@{STOP_BEFORE_S}"
    if "gres" in site.sbatch:
        options.pop("gpus-per-node", None)
    return options | site.sbatch


def _option(name: str, value: str | int | None) -> str:
    if value is None:
        return f"--{name}"
    text = str(value)
    if not re.fullmatch(r"[\w%+,./:@=\[\]-]+", text):
        text = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"--{name}={text}"


def _reached(command: Command) -> str:
    """Options of srun, and what precedes the command of a node, as words of bash."""
    srun, container = command.site.srun, command.site.container
    words = [f"--{key}" if value is None else f"--{key}={value}" for key, value in srun.items()]
    more = container.words(command.arm, command.folders) if container else ""
    return f"{quoted(words)} {more}".strip()


def check_options(site: Site, workload: Workload) -> None:
    """`LaunchError` for an option of the site that the ranks of this job cannot live with."""
    cluster = workload.cluster
    expected = {"nodes": cluster.nodes, "ntasks-per-node": 1}
    if cluster.gpu != "cpu":
        expected["gpus-per-node"] = cluster.gpus_per_node
    for name, value in expected.items():
        given = str(site.sbatch.get(name, value))
        if given.rpartition(":")[2] != str(value):  # a type of GPU may stand before the number
            raise LaunchError(
                f"--sbatch {name}={given} given, {name}={value} expected: the experiment has "
                f"{cluster.nodes} x {cluster.gpus_per_node} ranks; --set cluster.nodes=N changes it"
            )
    if "array" in site.sbatch:
        raise LaunchError("--sbatch array given: one job trains all arms, --arm chooses among them")
    if short := [name for name in site.sbatch if len(name) < 2]:
        raise LaunchError(f"--sbatch {short[0]} given, the long name of an option expected")


def check_there() -> None:
    """`LaunchError` where no job can be submitted."""
    if shutil.which("sbatch") is None:
        raise LaunchError("no sbatch on PATH: is this a node of a Slurm cluster?")


def submit(file: Path) -> str:
    """Hand the script to Slurm; the job's id. `LaunchError` with sbatch's output otherwise."""
    command = ["sbatch", "--parsable", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise LaunchError(
            f"sbatch refused {file}:\n{done.stderr.strip()}\n"
            "Correct the script and hand it to sbatch, or launch again with --resume."
        )
    return done.stdout.strip().split(";")[0]
