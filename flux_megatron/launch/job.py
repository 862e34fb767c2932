"""The job of a run, which trains its arms in turn on the same nodes, as docs/cluster.md explains.

`flux-megatron launch` copies this file into the run's folder, where job.sbatch starts it on the
job's first node. It needs nothing but the standard library, as Python 3.6 has it.

USR1, by which Slurm says that the time limit is near, and CHLD are blocked. They are taken where
ranks are waited for, so they interrupt nothing and none is lost. Children have them unblocked. TERM
is what scancel sends, and ends the job as it ends any program.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, NoReturn, Optional, Sequence, Tuple

EVENTS = {signal.SIGUSR1, signal.SIGCHLD}
GRACE_S = 60  # for ranks that hang to write where they are
DOCTOR_S = 600  # for all nodes, from before their containers start
ANSWER_S = 60  # for Slurm to say what it knows of another job
TIMED_OUT = 124  # of `timeout`


class Settings(NamedTuple):
    """What a launch decides. In options of srun, $SLURM_JOB_ID stands for the job."""

    run: str
    arms: List[str]  # folders of the run, in the order in which they are trained
    mode: str  # start or resume
    progress: str  # a file below an arm's folder, which changes with every checkpoint
    srun: Dict[str, List[str]]  # further options, by the arm's name
    preflight_s: Optional[int]  # for a node to look at its GPUs; None: no node does
    retries: int
    silent_s: int


class Job:
    """In the `environment` of a batch script. Whatever ends the job raises `SystemExit`."""

    def __init__(self, settings: Settings, environment: Dict[str, str]) -> None:
        self.settings, self.run = settings, Path(settings.run)
        self.id, self.restarts = environment["SLURM_JOB_ID"], environment["SLURM_RESTART_COUNT"]
        self.mode = "resume" if int(self.restarts) else settings.mode
        self.nodes = scontrol("show", "hostnames", environment["SLURM_JOB_NODELIST"]).split()
        # a node's name need not be one that other nodes can resolve, its address is
        head = field("node", self.nodes[0], "NodeAddr") or self.nodes[0]
        self.endpoint = f"{head}:{20000 + int(self.id) % 10000}"
        self.before = self.progress()

    def train_all(self) -> None:
        self.take_run()
        examined = False
        for arm in self.settings.arms:
            folder = self.run / arm
            if self.mode == "start" and (folder / "started").exists():
                fail(2, f"{folder} was started before: launch it with --resume to continue")
            if (folder / "done").exists():
                continue
            if not examined:  # before the doctor, for which a node without its GPUs ends the job
                self.examine(arm)
                examined = True
            code = self.ask(DOCTOR_S, arm, "doctor")
            if code:
                said = f"no answer in {DOCTOR_S} s" if code == TIMED_OUT else "see above"
                fail(code, f"a node is not fit to start: {said}")
            if signal.SIGUSR1 in signal.sigpending():
                self.leave(0)
            self.train(arm)

    def take_run(self) -> None:
        """Two jobs would write the same checkpoints: the later one ends."""
        other = trained_by(self.run)
        if other not in ("", self.id):
            fail(2, f"job {other} trains {self.run}: cancel it to go on with job {self.id}")
        (self.run / "job").write_text(f"{self.id}\n")

    def on_each_node(self, arm: str, *mode: str) -> List[str]:
        """Runs a mode of the arm's command.sh on every node, in the arm's container."""
        further = self.settings.srun[Path(arm).name]
        return [
            "srun", f"--ntasks={len(self.nodes)}", "--ntasks-per-node=1", "--kill-on-bad-exit=1",
            "--mpi=none", "--cpu-bind=none", "--label",
            *[word.replace("$SLURM_JOB_ID", self.id) for word in further],
            "bash", str(self.run / arm / "command.sh"), *mode,
        ]  # fmt: skip

    def ask(self, bound_s: float, arm: str, *mode: str) -> int:
        """The exit code of a mode on every node, `TIMED_OUT` where it does not end in time."""
        bounded = ["timeout", "--kill-after=10", str(bound_s)]
        return exit_code(child(bounded + self.on_each_node(arm, *mode)).wait())

    def examine(self, arm: str) -> None:
        """Every node looks at its GPUs and links, and writes what it finds into a file of its name.

        A node bounds its own check, from its container's start. `timeout` ends a container that
        does not start.
        """
        if self.settings.preflight_s is None:
            log("no GPUs, or the site says preflight: false: nodes are not examined")
            return
        verdicts = self.run / "preflight" / f"{self.id}-{self.restarts}"
        verdicts.mkdir(parents=True, exist_ok=True)
        self.ask(2 * self.settings.preflight_s, arm, "preflight", str(verdicts))
        if not any((verdicts / node).exists() for node in self.nodes):
            fail(1, "no node could be examined: see above")
        found = {node: text(verdicts / node, "unfit: no verdict, see above") for node in self.nodes}
        for node, verdict in found.items():
            log(f"node {node}: {verdict}")
        unfit = [node for node, verdict in found.items() if not verdict.startswith("fit")]
        if unfit:
            self.again(1, f"unfit nodes: {' '.join(unfit)}", unfit)

    def train(self, arm: str) -> None:
        """Returns when the arm is done."""
        folder = self.run / arm
        mode = self.mode if (folder / "started").exists() else "start"
        (folder / "started").touch()
        for name in ("silent", "failed"):
            with contextlib.suppress(FileNotFoundError):
                (folder / name).unlink()
        log(f"{arm}, {mode}, {len(self.nodes)} nodes, rendezvous at {self.endpoint}")
        code, stopped = self.wait(child(self.on_each_node(arm, mode, self.endpoint)), folder)
        if stopped:
            self.leave(code)
        if code:
            reason = text(folder / "failed", f"ranks ended with code {code}")
            self.again(code, f"{arm}: {text(folder / 'silent', reason)}")
        (folder / "done").touch()

    def wait(self, ranks: "subprocess.Popen[bytes]", folder: Path) -> Tuple[int, bool]:
        """Their exit code, and whether the time limit came near: they save and end then.

        Where no rank has written a line for `silent_s` they hang: they write where each of them is,
        and are ended.
        """
        size, since, hang, stopped = -1, time.monotonic(), False, False
        while ranks.poll() is None:
            pause_s = GRACE_S if hang else min(30, self.settings.silent_s / 4)
            event = signal.sigtimedwait(EVENTS, pause_s)
            if event and event.si_signo == signal.SIGUSR1:
                stopped = True
                ranks.send_signal(signal.SIGUSR1)
            elif event is None and hang:
                ranks.kill()
            elif event is None:
                now, seen = time.monotonic(), written(folder / "logs")
                if seen != size:
                    size, since = seen, now
                elif now - since >= self.settings.silent_s:
                    line = f"no rank has written a line for {int(now - since)} s\n"
                    (folder / "silent").write_text(line)
                    ranks.send_signal(signal.SIGUSR2)
                    hang = True
        return exit_code(ranks.returncode), stopped

    def progress(self) -> str:
        """What a restart would not do again: the number of arms that are done, and the newest
        checkpoint of the next one.
        """
        done = [(self.run / arm / "done").exists() for arm in self.settings.arms]
        finished = [*done, False].index(False)
        arm = [*self.settings.arms, self.settings.arms[-1]][finished]
        return f"{finished} {text(self.run / arm / self.settings.progress, 'none')}"

    def again(self, code: int, reason: str, without: Sequence[str] = ()) -> NoReturn:
        """The job queues up again, `without` some nodes, unless it did so `retries` times in a row
        without progress.
        """
        if field("job", self.id, "JobState") != "RUNNING":  # it was cancelled
            sys.exit(code)
        log(reason)
        failures, now = self.run / self.settings.arms[0] / "failures", self.progress()
        with failures.open("a") as file:
            file.write(f"{now}\t{dated(reason)}\n")
        lines = text(failures, "").splitlines()
        count = [line.split("\t")[0] for line in lines].count(now)
        if count > self.settings.retries:
            what = f"{count} failures without progress, see {failures}"
            fail(code, dated(f"not queued again: {what}"))
        excluded = field("job", self.id, "ExcNodeList").replace("(null)", "")
        self.requeue()
        if without:  # which can be excluded of a job that waits, not of one that runs
            nodes = ",".join([excluded, *without]).strip(",")
            with contextlib.suppress(subprocess.CalledProcessError):
                scontrol("update", f"JobId={self.id}", f"ExcNodeList={nodes}")
                log(f"queued again without {nodes}")
        sys.exit(code)

    def leave(self, code: int) -> NoReturn:
        """The time limit is near and the ranks have ended: the job queues up again."""
        if self.progress() == self.before:
            fail(1, "no checkpoint was written before the time limit: not queued again")
        self.requeue()
        sys.exit(code)

    def requeue(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which it sends to us and to scontrol too
        scontrol("requeue", self.id)


def unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, EVENTS)


def child(words: Sequence[str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, preexec_fn=unblock)


def exit_code(code: int) -> int:
    """As shells count: 128 and the signal."""
    return 128 - code if code < 0 else code


def scontrol(*words: str, check: bool = True, **how: Any) -> str:
    """What it says. It says itself why it fails."""
    return subprocess.run(
        ["scontrol", *words],
        stdout=subprocess.PIPE, universal_newlines=True, check=check, preexec_fn=unblock, **how,
    ).stdout  # fmt: skip


def field(kind: str, name: str, key: str, **how: Any) -> str:
    """Of what Slurm knows; empty where it does not."""
    said = scontrol("--oneliner", "show", kind, name, check=False, **how)
    return [*re.findall(rf" {key}=(\S*)", said), ""][0]


def trained_by(run: Path, *waiting: str) -> str:
    """The job that trains a run, or is `waiting` to go on, in one of these states; empty if Slurm
    knows none.
    """
    job = text(run / "job", "")
    if not job:
        return ""
    try:  # quietly: Slurm forgets a job minutes after its end
        state = field("job", job, "JobState", stderr=subprocess.DEVNULL, timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        return ""
    return job if state in ("RUNNING", *waiting) else ""


def text(file: Path, missing: str) -> str:
    try:
        return file.read_text(errors="backslashreplace").rstrip("\n")
    except OSError:
        return missing


def written(folder: Path) -> int:
    """The size of all that is below a folder, in bytes."""
    size = 0
    for where, folders, files in os.walk(str(folder)):
        for name in folders + files:
            with contextlib.suppress(OSError):  # it is gone
                size += os.lstat(os.path.join(where, name)).st_size
    return size


def dated(line: str) -> str:
    return f"{datetime.now().astimezone().isoformat(timespec='seconds')} {line}"


def log(line: str) -> None:
    print(dated(line), flush=True)


def fail(code: int, line: str) -> NoReturn:
    print(line, file=sys.stderr, flush=True)
    sys.exit(code)


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, EVENTS)
    os.environ.setdefault("SLURM_RESTART_COUNT", "0")  # which Slurm does not set in the first start
    Job(Settings(**json.loads(sys.argv[1])), dict(os.environ)).train_all()
