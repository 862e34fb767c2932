"""Every fault of a job: how it is made, and how the job must end."""

from __future__ import annotations

import functools
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

from fault_case import RANKS, SAVE_EVERY, STEPS, Case, End, Ended

WAITED = r"SignalTimeout|RankLost|ProblemMismatch"
FAULTS: dict[str, Callable[[Case], End]] = {}


def fault(name: str) -> Callable[[Callable[[Case], End]], Callable[[Case], End]]:
    """Enter a fault in the table by the words of the page."""

    def enter(body: Callable[[Case], End]) -> Callable[[Case], End]:
        FAULTS[name] = body
        return body

    return enter


@fault("SIGKILL of one rank")
def kill(case: Case) -> End:
    job, victim = case.start(), case.any_rank()
    case.reach_a_moment(job)
    case.strike(job, victim, signal.SIGKILL)
    return case.failed(job, f"rank_{victim} was killed by SIGKILL")


@fault("SIGSTOP of one rank")
def stop(case: Case) -> End:
    job, victim = case.start(), case.any_rank()
    case.reach_a_moment(job)
    case.strike(job, victim, signal.SIGSTOP)
    return case.failed(job, f"rank_{victim} is stopped")


@fault("SIGSTOP of all ranks")
def stop_all(case: Case) -> End:
    job = case.start()
    case.reach_a_moment(job)
    for rank in range(RANKS):
        case.strike(job, rank, signal.SIGSTOP)
    return case.failed(job, "rank_0 is stopped")


@fault("an exception in one rank")
def exception(case: Case) -> End:
    job = case.start(plant=case.plant(_planted, case.any_rank(), case.any_call(), _raise))
    return case.failed(job, "OSError: planted")


@fault("a skipped call")
def skip(case: Case) -> End:
    job = case.start(plant=case.plant(_planted, case.any_rank(), case.any_call(), None))
    return case.failed(job, WAITED)


@fault("a rank that is late, within the bound")
def late(case: Case) -> End:
    nap = functools.partial(time.sleep, 0.4 * case.world.bound_s)
    job = case.start(plant=case.plant(_planted, case.any_rank(), case.any_call(), nap))
    return case.same(case.end(job), job)


@fault("a rank that is late, beyond the bound")
def too_late(case: Case) -> End:
    victim, nap = case.any_rank(), functools.partial(time.sleep, 100)
    job = case.start(plant=case.plant(_planted, victim, case.any_call(), nap))
    return case.failed(job, WAITED)


@fault("SIGKILL of the launcher")
def launcher(case: Case) -> End:
    job = case.start()
    case.reach_a_moment(job)
    os.kill(job.pid, signal.SIGKILL)
    return case.resumed(case.end(job))


@fault("SIGTERM of the launcher")
def terminate(case: Case) -> End:
    job = case.start()
    case.reach_a_moment(job)
    os.kill(job.pid, signal.SIGTERM)
    end = case.end(job)
    if job.code not in (130, 0, -signal.SIGTERM):
        end.wrong = f"code {job.code}:\n{job.output[-3000:]}"
    return case.resumed(end)


@fault("a kill while a checkpoint is written")
def kill_writer(case: Case) -> End:
    job, victim = case.start(), case.random.choice(("launcher", *range(RANKS)))
    step = SAVE_EVERY * case.random.randint(1, STEPS // SAVE_EVERY)
    partial = job.out / "checkpoints" / f"step_{step}.partial"
    while not partial.exists() and job.running():
        pass
    time.sleep(case.random.uniform(0, 0.1))
    case.begin(job)
    if victim == "launcher":
        os.kill(job.pid, signal.SIGKILL)
    else:
        case.strike(job, victim, signal.SIGKILL)
    end = case.end(job)
    return case.resumed(end)


@fault("a full disk")
def full_disk(case: Case) -> End:
    job, room = case.start(), case.random.choice((0, 100, 4096, 65536))
    case.reach_a_moment(job)
    for rank in range(RANKS):
        case.limit_files(job, rank, room)
    end = case.failed(job, "File too large|could not be written")
    if job.code == 0:  # nothing was written any more, or only what had room
        raise Ended
    return case.resumed(end)


@fault("a full shared memory")
def full_memory(case: Case) -> End:
    job = case.start(plant=case.plant(_poor, case.any_rank(), case.random.randint(1, 5)))
    return case.failed(job, "WorkspaceError: .*bytes of shared memory: .*File too large")


@fault("two jobs at once, and a third in a folder that is taken")
def two_jobs(case: Case) -> End:
    shared = {"settings": {"data.cache": str(case.folder / "cache")}}
    first = case.start("first", **shared)
    time.sleep(case.random.uniform(0, case.world.seconds / 2))
    second = case.start("second", **shared)
    first.rank(0)  # by now the folder is its own
    third = case.start("first", resume=True, label="-again", **shared)
    end = case.end(second, case.world.limit_s + 10 * case.world.seconds)
    for other in (first, third):
        other.wait(case.world.limit_s)
    if third.code != 2 or "another run is writing" not in third.output:
        end.wrong = f"the third's code {third.code}:\n{third.output}"
    return case.same(case.same(end, second), first)


@fault("torn metrics.jsonl")
def torn_metrics(case: Case) -> End:
    out = case.halfway()
    _tear(case, out / "metrics.jsonl")
    job = case.start(resume=True)
    return case.same(case.end(job), job)


@fault("torn checkpoint")
def torn_checkpoint(case: Case) -> End:
    out = case.halfway()
    files = [*(out / "checkpoints" / f"step_{STEPS - 1}").iterdir(), out / "checkpoints" / "latest"]
    _tear(case, case.random.choice(sorted(files)))
    job = case.start(resume=True)
    return case.refused(job, "/checkpoints/.*(latest|whole one)")


@fault("torn cache of plans")
def torn_plans(case: Case) -> End:
    from flux_megatron.tuning import plan_cache

    shipped = sorted(plan_cache.shipped().glob("*/*.json"))
    file = case.folder / "cache" / "plans" / "cpu" / "torn.json"
    file.parent.mkdir(parents=True)
    file.write_bytes(case.random.choice(shipped).read_bytes()[:100_000])
    _tear(case, file)
    environment = {"FLUX_MEGATRON_CACHE": str(case.folder / "cache")}
    job = case.start(settings={"strategy": "auto", "train.steps": 1}, environment=environment)
    end = case.end(job)
    log = (job.out / "logs" / "rank_0.log").read_text()
    if job.code or "measured plans are left out" not in log:
        end.wrong, end.named = f"code {job.code}:\n{job.output[-2000:]}\n{log[-2000:]}", False
    return end


def _tear(case: Case, file: Path) -> None:
    """Keep only a random beginning of it."""
    os.truncate(file, case.random.randrange(file.stat().st_size))


def _raise() -> None:
    raise OSError("planted")


def _planted(
    victim: int, number: int, action: Callable[[], None] | None, note: Callable[[], None], rank: int
) -> None:
    """On rank `victim`, call `action` before that forward of a row layer; None leaves it out."""
    from flux_megatron.integration import layers

    if rank != victim:
        return
    layer, seen = layers.FluxRowParallelLinear, 0
    forward = layer.forward

    def planted(self, x):
        nonlocal seen
        seen += 1
        if seen != number:
            return forward(self, x)
        note()
        if action is None:
            return x.new_zeros(x.shape[0] // RANKS, x.shape[1], self.output_size), None
        action()
        return forward(self, x)

    layer.forward = planted


def _poor(victim: int, number: int, note: Callable[[], None], rank: int) -> None:
    """On rank `victim`, that piece of shared memory is more than there is."""
    if rank != victim:
        return
    allocate, seen = os.posix_fallocate, 0

    def poor(descriptor: int, offset: int, size: int) -> None:
        nonlocal seen
        seen += 1
        if seen != number:
            return allocate(descriptor, offset, size)
        note()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, hard))
        try:
            return allocate(descriptor, offset, size)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    os.posix_fallocate = poor
