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
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import slurm_files
from slurm_files import PATH

POLL_S = 0.1
CALL_S = 60  # for one command; Slurm's own timeouts are shorter
# Of a job that was queued again. A start in the second in which its last one was ended is refused:
# slurmd tells starts apart by whole seconds ("Job credential revoked", 22.05, on two busy cores).
SOON = "StartTime=now+2"
FOREIGN = ("SLURM_", "SBATCH_", "SRUN_")


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
        self.file, self.tells = folder / "slurm.conf", folder / slurm_files.TELLS
        self.slurmd = slurm_files.write(folder, f"{self.kind}[1-{self.count}]", cpus, gpus, apart)
        # without the variables of a Slurm job that we may run in ourselves
        ours = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
        self.environment = ours | {"PATH": PATH, "SLURM_CONF": str(self.file)}

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


def _processes_with(*words: str) -> list[int]:
    """Processes of this user, but not this one, whose environment has these, from the oldest on."""
    found, marks = [], {word.encode() for word in words}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended, or another user's
            if marks <= {*(folder / "environ").read_bytes().split(b"\0")}:
                found.append(int(folder.name))
    return sorted({*found} - {os.getpid()})
