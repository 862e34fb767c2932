"""RUN/job.sbatch: the arms of an experiment as a job array of Slurm."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from flux_megatron.launch.command_line import Command, render
from flux_megatron.launch.site import LaunchError

STOP_BEFORE_S = 300  # before the time limit, for ranks to finish their step and save


def script(name: str, run: Path, commands: Sequence[Command], resume: bool) -> str:
    """The text of job.sbatch. What the site says of an option stands instead of ours."""
    workload, site = commands[0].workload, commands[0].site
    cluster = workload.cluster
    options: dict[str, str | int | None] = {
        "job-name": name.replace("/", "-"),
        "nodes": cluster.nodes,
        "ntasks-per-node": 1,
        # one arm at a time: they are to be compared, and would share the network
        "array": f"0-{len(commands) - 1}%1",
        "output": f"{str(run).replace('%', '%%')}/slurm-%A_%a.out",
        "open-mode": "append",
        "requeue": None,
    }
    if cluster.gpu != "cpu":
        options |= {"gpus-per-node": cluster.gpus_per_node, "exclusive": None}
    if commands[0].on_resume:
        options["signal"] = f"B:USR1@{STOP_BEFORE_S}"
    if "gres" in site.sbatch:
        options.pop("gpus-per-node", None)
    options |= site.sbatch
    return render(
        "job.sbatch.j2",
        name=name,
        options=[_option(key, value) for key, value in options.items()],
        run=run,
        arms=[command.arm for command in commands],
        mode="resume" if resume else "start",
        progress=commands[0].progress,
    )


def _option(name: str, value: str | int | None) -> str:
    if value is None:
        return f"--{name}"
    text = str(value)
    if not re.fullmatch(r"[\w%+,./:@=\[\]-]+", text):
        text = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"--{name}={text}"


def check_there() -> None:
    """`LaunchError` where no job can be submitted."""
    if shutil.which("sbatch") is None:
        raise LaunchError("no sbatch on PATH: is this a node of a Slurm cluster?")


def submit(file: Path) -> str:
    """Hand the script to Slurm; the job's id. `LaunchError` with what sbatch says otherwise."""
    done = subprocess.run(
        ["sbatch", "--parsable", str(file)], capture_output=True, text=True, timeout=120
    )
    if done.returncode:
        raise LaunchError(
            f"sbatch refused {file}:\n{done.stderr.strip()}\n"
            "Correct the script and hand it to sbatch, or launch again with --resume."
        )
    return done.stdout.strip().split(";")[0]
