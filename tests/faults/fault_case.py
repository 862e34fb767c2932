"""What every fault is tried on, and what is asked of its end."""

from __future__ import annotations

import functools
import os
import random
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from checkpoint_tensors import tensors
from fault_job import ROOT, Job
from forked_processes import children, ending

RANKS = 2
STEPS, SAVE_EVERY = 4, 2
SLACK_S = 10.0  # for a machine that does other work too
GRACE_S = 5.0 + 1.0  # of the parent, after a rank has failed
TINY = {
    "model.num_layers": 1, "model.hidden": 32, "model.heads": 4, "model.ffn": 64,
    "model.seq_length": 32, "train.micro_batch": 1, "train.global_batch": 1,
    "train.warmup_steps": 1, "train.log_every": 1, "strategy": "pipelined", "train.steps": STEPS,
    "train.save_every": SAVE_EVERY, "parallel.tp": RANKS,
}  # fmt: skip
# an error that tells what became of the run, in the file of a rank's error
NAMED = re.compile(
    r"\.(RankLost|SignalTimeout|ProblemMismatch|WorkspaceError|ConfigError): "
    r"|it was ended, because rank_\d|had ended by itself|was killed by SIG|is stopped|Error: "
)


FACTS = {
    "had ended by itself": "none, done before", "it was ended": "ended by the launcher",
    "is stopped": "stopped", "was killed": "killed",
}  # fmt: skip


@dataclass
class End:
    """How one try ended. `wrong` says what was not as it should be, or nothing."""

    ended: bool
    named: bool
    seconds: float
    orphans: int
    leftovers: int
    wrong: str = ""
    errors: list[str] = field(default_factory=list)


class Ended(Exception):
    """The job was over before the fault came: the try does not count."""


class Case:
    """A fresh folder, a seeded random generator, and the undisturbed run to compare with."""

    def __init__(self, folder: Path, seed: str, world: World) -> None:
        self.folder, self.random, self.world = folder, random.Random(seed), world
        folder.mkdir(parents=True)
        self.shared_before = set(os.listdir("/dev/shm"))
        self.since, self.note = 0.0, folder / "note"

    def start(self, name: str = "run", **options: Any) -> Job:
        """A job in a folder of that name; `settings` change its configuration."""
        return self.world.job(self.folder / name, **options)

    def halfway(self, name: str = "run") -> Path:
        """A run that was ended after some checkpoints."""
        return shutil.copytree(self.world.halfway, self.folder / name)

    def any_rank(self) -> int:
        return self.random.randrange(RANKS)

    def any_call(self) -> int:
        """The number of a forward of a row-parallel layer, from 1: two in a step."""
        return self.random.randint(1, STEPS * 2)

    def plant(self, body: Callable[..., None], *arguments: Any) -> Callable[[int], None]:
        """`body` for every rank of a job; it calls its last but one when the fault comes."""
        return functools.partial(body, *arguments, functools.partial(_note, self.note))

    def reach_a_moment(self, job: Job) -> None:
        """Return at any time of the job's; `Ended` if it was shorter than the undisturbed one."""
        job.rank(RANKS - 1)
        moment = job.started + self.random.uniform(0, self.world.seconds)
        while time.monotonic() < moment and job.running():
            time.sleep(0.001)
        self.begin(job)

    def begin(self, job: Job) -> None:
        """The fault comes now: its time runs."""
        if not job.running():
            raise Ended
        self.since = time.monotonic()

    def strike(self, job: Job, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank; `Ended` if that is about to be gone by itself."""
        with _reachable(job, rank) as pid:
            os.kill(pid, number)

    def limit_files(self, job: Job, rank: int, size: int) -> None:
        """Let a rank write no file beyond `size` bytes; `Ended` as in `strike`."""
        with _reachable(job, rank) as pid:
            hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))

    def failed(self, job: Job, says: str, spared: int | None = None) -> End:
        """The job must fail by `says`, and every rank but `spared` must have a named error."""
        end = self.end(job)
        output = job.output
        unnamed = [r for r in range(RANKS) if r != spared and not NAMED.search(job.error(r))]
        end.errors = [_kind(job.error(rank)) for rank in range(RANKS)]
        end.named = bool(re.search(says, output)) and not unnamed
        if job.code != 1 or not end.named:
            end.wrong = f"code {job.code}, {says!r} expected, unnamed {unnamed}:\n{output[-3000:]}"
        return end

    def refused(self, job: Job, says: str) -> End:
        """The job must end by `says` as bad input: most of it before any rank is started."""
        end = self.end(job)
        end.named = bool(re.search(says, job.output))
        if job.code != 2 or not end.named:
            end.wrong = f"code {job.code}, {says!r} expected:\n{job.output[-3000:]}"
        return end

    def resumed(self, end: End, name: str = "run", **options: Any) -> End:
        """Also: the run goes on from its checkpoint, and changes no bit. One that failed before
        its first step starts again.
        """
        begun = (self.folder / name / "config.json").exists()
        job = self.start(name, resume=begun, **options)
        if not job.wait(self.world.limit_s + 10 * self.world.seconds):
            os.kill(job.pid, signal.SIGKILL)
        return self.same(end, job)

    def same(self, end: End, job: Job) -> End:
        """The job must have succeeded with the undisturbed run's weights, moments and losses."""
        problem = "" if job.code == 0 else f"code {job.code}:\n{job.output[-3000:]}"
        problem = problem or self.world.difference(job.out)
        end.named &= not problem
        end.wrong = end.wrong or problem
        return end

    def end(self, job: Job, limit_s: float | None = None) -> End:
        """Wait for its end, and for what it may have left."""
        while not (self.since or self.note.exists()) and job.running():
            time.sleep(0.01)  # until the planted fault has come
        ended = job.wait(limit_s or self.world.limit_s)
        since = self.since or float(self.note.read_text() if self.note.exists() else job.started)
        seconds = time.monotonic() - since
        if not ended:
            os.kill(job.pid, signal.SIGKILL)
        deadline = time.monotonic() + 2
        while (left := children()) and time.monotonic() < deadline:
            time.sleep(0.01)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return End(ended, True, seconds, len(left) if ended else 0, self._leftovers(job))

    def _leftovers(self, job: Job) -> int:
        """New files of shared memory that are the job's: a number of a process is in the name."""
        pids = [str(job.pid), *(file.read_text() for file in job.pids.iterdir())]
        new = set(os.listdir("/dev/shm")) - self.shared_before
        return sum("flux" in name or any(pid in name for pid in pids) for name in new)


@contextmanager
def _reachable(job: Job, rank: int) -> Iterator[int]:
    """The process of a rank that gets a fault; `Ended` if it ends by itself before."""
    pid = job.rank(rank)
    if ending(pid):
        raise Ended
    try:
        yield pid
    except ProcessLookupError:
        raise Ended from None


class World:
    """What all tries share: the text, an undisturbed run, one ended halfway, the bound."""

    def __init__(self, folder: Path, device: str, bound_s: float) -> None:
        self.folder, self.device, self.bound_s = folder, device, bound_s
        self.text = folder / "text"
        self.text.mkdir(parents=True)
        (self.text / "words.txt").write_text(" ".join(f"{i} is {i * i}." for i in range(3000)))
        self.seconds = 0.0
        self.limit_s = bound_s + GRACE_S + SLACK_S
        self.reference, self.halfway = folder / "reference", folder / "halfway"

    def prepare(self) -> float:
        """Make the two runs; the seconds of one. Call in a keeper."""
        for out, steps in ((self.reference, STEPS), (self.halfway, STEPS - 1)):
            job = self.job(out, settings={"train.steps": steps})
            assert job.wait(300), "the undisturbed run did not end"
            assert job.code == 0, job.output
            self.seconds = time.monotonic() - job.started  # the second finds all in memory
        return self.seconds

    def job(
        self, out: Path, settings: dict[str, object] | None = None,
        environment: dict[str, str] | None = None, **options: Any,
    ) -> Job:  # fmt: skip
        """A job in `out`; `settings` change its configuration."""
        from flux_megatron.lab.train import config

        own = {"parallel.device": self.device, "data.path": str(self.text)}
        demo = ROOT / "configs" / "train" / "demo.yaml"
        bound = {"FLUX_MEGATRON_TIMEOUT_S": str(self.bound_s)}
        configuration = config.load(demo, TINY | own | (settings or {}))
        return Job(configuration, out, environment=bound | (environment or {}), **options)

    def difference(self, out: Path) -> str:
        """What differs from the undisturbed run at the end, or nothing."""
        mine, its = (
            tensors(run / "checkpoints" / f"step_{STEPS}") for run in (out, self.reference)
        )
        if mine.keys() != its.keys():
            return f"other tensors: {sorted(mine.keys() ^ its.keys())}"
        return ", ".join(key for key in its if not torch.equal(mine[key], its[key]))


def _note(file: Path) -> None:
    """When a planted fault comes, by the clock that all processes share."""
    partial = file.with_suffix(".partial")
    partial.write_text(str(time.monotonic()))
    partial.rename(file)


def _kind(error: str) -> str:
    """The type of the exception that ended a rank, or what its parent knows."""
    raised = re.findall(r"^(?:[\w.]+\.)?(\w+): ", error, re.MULTILINE)
    if raised:
        return raised[-1]
    return next((said for words, said in FACTS.items() if words in error), "none")
