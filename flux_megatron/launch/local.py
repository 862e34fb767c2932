"""The arms of an experiment one after the other on this machine, without Slurm."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence

from flux_megatron.launch.command_line import Command
from flux_megatron.launch.errors import LaunchError
from flux_megatron.launch.workload import Workload

INTERRUPTED = 130


def check_gpus(workload: Workload) -> None:
    """`LaunchError` unless this machine has the GPUs of all nodes; a CPU has any number."""
    if workload.cluster.gpu == "cpu":
        return
    needed, found, nodes = workload.parallel.world_size, _gpus(), workload.cluster.nodes
    if found < needed:
        more = f": an experiment of {nodes} nodes is for --submit" if nodes > 1 else ""
        raise LaunchError(f"{needed} GPUs needed on this machine, {found} found{more}")


def run(commands: Sequence[Command], resume: bool, log: Callable[[str], None]) -> int:
    """The first exit code that is not 0, of the preflight or of an arm; later arms do not run.

    An allocation of Slurm around us is not looked at: its nodes are not started here.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    for command in commands:
        script = ["bash", str(command.folder / "command.sh")]
        log(f"arm {command.name}: {'resume' if resume else 'start'}")
        for mode in ("doctor", "resume" if resume else "start"):
            code = _wait(subprocess.Popen([*script, mode], env=environment))
            if code:
                log(f"arm {command.name}: {mode} ended with code {code}")
                return code
    return 0


def _wait(process: subprocess.Popen[bytes]) -> int:
    """The exit code, 130 after Ctrl-C, which reaches the ranks too: torchrun ends them, and they
    are waited for.
    """
    interrupted = False
    while True:
        try:
            code = process.wait()
        except KeyboardInterrupt:  # noqa: PERF203, it is no hot loop
            interrupted = True
        else:
            return INTERRUPTED if interrupted and code else code


def _gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    done = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=60)
    return done.stdout.count("GPU ") if done.returncode == 0 else 0
