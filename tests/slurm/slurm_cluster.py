"""A Slurm of our own on this machine: one slurmctld, and a slurmd for each pretended node.

Needs Debian's slurm-wlm (scripts/slurm_install.sh), whose slurmd can run several times on one
host, and nothing else: no root, no munge, no cgroups, no systemd, no host name that resolves. Its
files may also lie in a folder of their own whose bin/ is on PATH, with plugins in lib/plugins.

Nodes without GPUs are in the partition `cpu`. Beside them the partition `gpu` has rented ones that
never start ("cloud"): Slurm plans jobs for them (`sbatch --test-only`) as for any other. Nodes with
GPUs of this machine are in the partition `gpu`, alone.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

POLL_S = 0.1
CALL_S = 60  # for one command; Slurm's own timeouts are shorter
PATH = f"{os.environ['PATH']}:/usr/sbin"  # Debian's daemons; not on every user's path
# Of a job that was queued again. A start in the second in which its last one was ended is refused:
# slurmd tells starts apart by whole seconds ("Job credential revoked", 22.05, on two busy cores).
SOON = "StartTime=now+2"
OF_A_NODE = Path(__file__).parent / "of_a_node"
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
TaskProlog={folder}/prolog.sh
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
NodeName={kind}[1-{count}] NodeAddr=127.0.0.1 Port=[{ports}] CPUs={cpus}{gres}
PartitionName={kind} Nodes={kind}[1-{count}] Default=YES
{further}
"""

RENTED = """
NodeName=gpu[1-16] CPUs=128 RealMemory=2000000 Gres=gpu:8 State=CLOUD
PartitionName=gpu Nodes=gpu[1-16]
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
    """Nodes cpu1 to cpu3 of 4 CPUs, whatever this machine has, and gpu1 to gpu16 of 8 GPUs.

    With `gpus`, files such as /dev/nvidia0 for each node, the nodes are gpu1, gpu2 and so on, and a
    job sees those alone. What runs on a node takes it for a machine of its own if `apart`.
    """

    def __init__(
        self,
        folder: Path,
        count: int = 3,
        cpus: int = 4,
        gpus: Sequence[Sequence[str]] = (),
        apart: bool = False,
    ) -> None:
        self.folder, self.daemons = folder, list[subprocess.Popen[bytes]]()
        self._hastened: set[tuple[str, str]] = set()  # restarts of jobs
        self.kind, self.count = ("gpu", len(gpus)) if gpus else ("cpu", count)
        self.nodes = {"gpu": 16} | {self.kind: self.count}  # of each partition
        (folder / "state").mkdir(parents=True)
        controller_port, *ports = _free_ports(1 + self.count)
        self.file = folder / "slurm.conf"
        text = CONFIGURATION.format(
            folder=folder,
            user=pwd.getpwuid(os.getuid()).pw_name,
            controller_port=controller_port,
            kind=self.kind,
            count=self.count,
            ports=",".join(map(str, ports)),
            cpus=cpus,
            gres=f" Gres=gpu:{len(gpus[0])}" if gpus else "",
            further="" if gpus else RENTED,
        )
        # without the variables of a Slurm job that we may run in ourselves
        ours = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
        self.environment = ours | {"PATH": PATH, "SLURM_CONF": str(self.file)}
        self.slurmd = ["slurmd", "-D"]
        prefix = Path(shutil.which("slurmd", path=PATH) or "/").parent.parent
        if (prefix / "lib" / "plugins").is_dir():
            text += f"PluginDir={prefix}/lib/plugins\n"
            self.slurmd += ["-d", f"{prefix}/bin/slurmstepd"]
        self.file.write_text(text)
        (folder / "cgroup.conf").write_text(CGROUPS)
        of_nodes = [f"NodeName=gpu{n} Name=gpu File={','.join(g)}\n" for n, g in enumerate(gpus, 1)]
        (folder / "gres.conf").write_text("AutoDetect=off\n" + "".join(of_nodes))
        self.tells = folder / "ranks"
        self.tells.mkdir()
        (folder / "prolog.sh").write_text(self._prolog(gpus, apart))
        (folder / "prolog.sh").chmod(0o755)

    def __enter__(self) -> SlurmCluster:
        try:
            self._start("slurmctld", "slurmctld", "-D")
            for number in range(1, self.count + 1):
                name = f"{self.kind}{number}"
                (self.folder / name).mkdir()
                self._start(name, *self.slurmd, "-N", name)
            self.wait_for(self._nodes_are_idle, 30, "nodes to be idle")
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

    def outcome(self, job: str) -> str:
        """Its state and how often it was queued again: "COMPLETED 1". A job that was queued again
        starts soon, not in Slurm's two minutes.
        """
        fields = self.fields(job)
        state, restarts = fields["JobState"], fields["Restarts"]
        waits = state == "PENDING" and fields["Reason"] == "BeginTime"
        if waits and (job, restarts) not in self._hastened:
            self._hastened.add((job, restarts))
            self.call("scontrol", "update", f"JobId={job}", SOON)
        return f"{state} {restarts}"

    def processes(self, *words: str) -> list[int]:
        """Of this Slurm's jobs, those with these words, as "RANK=1", in their environment."""
        return _processes_with(f"SLURM_CONF={self.file}", *words)

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
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline and (left := self.processes()):
                for process in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, number)
                time.sleep(POLL_S)
        for daemon in self.daemons:
            daemon.wait(timeout=10)

    def _prolog(self, gpus: Sequence[Sequence[str]], apart: bool) -> str:
        """What it prints are variables of every task. Slurm numbers a node's GPUs from 0, where no
        cgroup hides the others.
        """
        lines = ["#!/bin/sh", "case $SLURMD_NODENAME in"]
        for number, files in enumerate(gpus, 1):
            numbers = ",".join(re.findall(r"\d+$", file)[0] for file in files)
            lines.append(f"gpu{number}) echo export CUDA_VISIBLE_DEVICES={numbers} ;;")
        lines.append("esac")
        if apart:
            ours = f"{OF_A_NODE}:{self.environment.get('PYTHONPATH', '')}"
            lines += [f'echo "export PYTHONPATH={ours}"', f"echo export RANKS_TELL={self.tells}"]
            lines.append("echo export NCCL_HOSTID=$SLURMD_NODENAME")
        return "\n".join([*lines, ""])

    def _start(self, name: str, *command: str) -> None:
        # dies with us, however we die
        line = ["setpriv", "--pdeathsig", "TERM", *command]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.daemons.append(
                subprocess.Popen(
                    line, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            )

    def _nodes_are_idle(self) -> bool:
        for daemon in self.daemons:
            assert daemon.poll() is None, f"{daemon.args} ended\n{self.logs()}"
        queried = self.call(
            "sinfo", "--noheader", "--Node", f"--partition={self.kind}", "--format=%T"
        )
        return queried.stdout.split() == ["idle"] * self.count


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as open_until_all_are_known:
        probes = [open_until_all_are_known.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _processes_with(*words: str) -> list[int]:
    """Processes of this user, but not this one, whose environment has these, from the oldest on."""
    found, marks = [], {word.encode() for word in words}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended, or another user's
            if marks <= {*(folder / "environ").read_bytes().split(b"\0")}:
                found.append(int(folder.name))
    return sorted({*found} - {os.getpid()})
