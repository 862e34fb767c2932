"""A Slurm of our own on this machine: one slurmctld, and a slurmd for each pretended node.

Needs Debian's slurm-wlm (scripts/slurm_install.sh), whose slurmd can run several times on one
host, and nothing else: no root, no munge, no cgroups, no systemd, no host name that resolves. Jobs
run in the partition `cpu`. The nodes of the partition `gpu` are rented ones that never start
("cloud"): Slurm plans jobs for them (`sbatch --test-only`) as for any other.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

POLL_S = 0.1
CALL_S = 60  # for one command; Slurm's own timeouts are shorter
PATH = f"{os.environ['PATH']}:/usr/sbin"  # Debian's daemons; not on every user's path
# Of a job that was queued again. A start in the second in which its last one was ended is refused:
# slurmd tells starts apart by whole seconds ("Job credential revoked", 22.05, on two busy cores).
SOON = "StartTime=now+2"
FOREIGN = ("SLURM_", "SBATCH_", "SRUN_")

CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
KillWait=2
MinJobAge=3600
PropagateResourceLimits=NONE
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
SuspendProgram=/bin/true
ResumeProgram=/bin/true
NodeName=cpu[1-{cpu_nodes}] NodeAddr=127.0.0.1 Port=[{cpu_ports}] CPUs=4
NodeName=gpu[1-{gpu_nodes}] CPUs=128 RealMemory=2000000 Gres=gpu:8 State=CLOUD
PartitionName=cpu Nodes=cpu[1-{cpu_nodes}] Default=YES
PartitionName=gpu Nodes=gpu[1-{gpu_nodes}]
"""

# slurmd insists on knowing of what kind cgroups are, though nothing here uses them; the kind that
# it would find by itself may want systemd
CGROUPS = "CgroupPlugin=cgroup/v1\n"


def why_unavailable() -> str | None:
    """Why no Slurm can be started here, or None."""
    programs = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol")
    missing = [name for name in programs if shutil.which(name, path=PATH) is None]
    return f"no {', '.join(missing)}: run scripts/slurm_install.sh" if missing else None


class SlurmCluster:
    """Nodes cpu1 to cpu3 of 4 CPUs, whatever this machine has, and gpu1 to gpu16 of 8 GPUs."""

    nodes: ClassVar = {"cpu": 3, "gpu": 16}  # of each partition

    def __init__(self, folder: Path) -> None:
        self.folder, self.daemons = folder, list[subprocess.Popen[bytes]]()
        (folder / "state").mkdir(parents=True)
        controller_port, *cpu_ports = _free_ports(1 + self.nodes["cpu"])
        self.file = folder / "slurm.conf"
        text = CONFIGURATION.format(
            folder=folder,
            user=pwd.getpwuid(os.getuid()).pw_name,
            controller_port=controller_port,
            cpu_ports=",".join(map(str, cpu_ports)),
            cpu_nodes=self.nodes["cpu"],
            gpu_nodes=self.nodes["gpu"],
        )
        self.file.write_text(text)
        (folder / "cgroup.conf").write_text(CGROUPS)
        # without the variables of a Slurm job that we may run in ourselves
        ours = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
        self.environment = ours | {"PATH": PATH, "SLURM_CONF": str(self.file)}

    def __enter__(self) -> SlurmCluster:
        try:
            self._start("slurmctld", "slurmctld", "-D")
            for number in range(1, self.nodes["cpu"] + 1):
                name = f"cpu{number}"
                (self.folder / name).mkdir()
                self._start(name, "slurmd", "-D", "-N", name)
            self.wait_for(self._cpu_nodes_are_idle, 30, "nodes to be idle")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, *command: str) -> str:
        """Standard output of a command that sees this Slurm; it must succeed."""
        done = self.call(*command)
        assert done.returncode == 0, (
            f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return done.stdout

    def call(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=CALL_S
        )

    def fields(self, job: str) -> dict[str, str]:
        """What Slurm knows of a job."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, done: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Until `done()`. `AssertionError` with the daemons' logs when it takes longer."""
        deadline = time.monotonic() + timeout_s
        while not done():
            assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}\n{self.logs()}"
            time.sleep(POLL_S)

    def logs(self) -> str:
        """The queue and the ends of the daemons' logs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            queue = self.call("squeue", "--all").stdout
            ends = [f"{log.name}:\n{log.read_text()[-2000:]}" for log in self.folder.glob("*.log")]
            return "\n".join([queue, *ends])
        return "squeue does not answer"

    def stop(self) -> None:
        """End the daemons and every process of every job; all carry our SLURM_CONF."""
        for daemon in self.daemons:
            daemon.terminate()
        mark = f"\0SLURM_CONF={self.file}\0".encode()
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline and (left := _processes_with(mark)):
                for process in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, number)
                time.sleep(POLL_S)
        for daemon in self.daemons:
            daemon.wait(timeout=10)

    def _start(self, name: str, *command: str) -> None:
        # dies with us, however we die
        line = ["setpriv", "--pdeathsig", "TERM", *command]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.daemons.append(
                subprocess.Popen(
                    line, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            )

    def _cpu_nodes_are_idle(self) -> bool:
        for daemon in self.daemons:
            assert daemon.poll() is None, f"{daemon.args} ended\n{self.logs()}"
        queried = self.call("sinfo", "--noheader", "--Node", "--partition=cpu", "--format=%T")
        return queried.stdout.split() == ["idle"] * self.nodes["cpu"]


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as open_until_all_are_known:
        probes = [open_until_all_are_known.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _processes_with(mark: bytes) -> list[int]:
    """Processes of this user, but not this one, whose environment has `mark`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended, or another user's
            if mark in b"\0" + (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return [process for process in found if process != os.getpid()]
