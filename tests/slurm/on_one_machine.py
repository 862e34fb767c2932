"""Jobs of `flux-megatron launch` in a Slurm whose nodes are parts of this machine.

    python tests/slurm/on_one_machine.py WHAT OUT --megatron-lm CHECKOUT [--gpus 1] [OPTIONS]

WHAT is one of

    arms    two rounds of stock and ours, and what `flux-megatron results` says of them
    faults  one arm: a rank is killed, its node drained, the time limit comes near
    ranks   stock and ours on 2, 8, 32 and 128 ranks of the CPU: what grows with their number

OPTIONS go to `flux-megatron launch`; `--set parallel.tp=2` and its like choose the layout. Rows go
to OUT/rows.jsonl, runs into OUT too. Each node takes itself for a machine of its own, so ranks of
two nodes meet through sockets. Where there are fewer GPUs than they want, nodes share some.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
from datetime import datetime
from pathlib import Path

import torch
from launched_jobs import ON_CPU, ON_GPUS, Job, Session
from slurm_cluster import SlurmCluster

# of the job whose checkpoints are written: on GPUs 0.7 GB each
SMALL = "hidden=1024 heads=8 kv_heads=8 ffn=4096 layers=2 vocab=8192 seq_length=1024"
# by our runs: what was compiled and raced, and which calls overlapped
SAID = r"flux_megatron: (compiled .*|measured .*|\d+ of \d+ calls overlapped.*)"
LAYOUTS = {2: (2, 1, 1), 4: (4, 1, 1), 8: (8, 1, 1), 16: (8, 1, 2), 32: (8, 2, 2), 128: (8, 8, 2)}


def arms(session: Session) -> None:
    began = time.monotonic()
    job = session.submit("arms", "--arm", "megatron", "--arm", "flux")
    outcome = job.reaches("COMPLETED", "FAILED", within_s=session.given.limit_s)
    print(job.output()[-6000:])
    said = session.slurm.call(
        sys.executable, "-m", "flux_megatron.cli", "results", str(job.run),
        "--json", str(session.out / "results.json"),
    )  # fmt: skip
    print(said.stdout + said.stderr)
    steps = [(number, ms, loss) for _, number, ms, loss in job.iterations()]
    verdicts = re.findall(r"node \S+: .*", job.output())
    seconds = round(time.monotonic() - began, 1)
    ours = re.findall(SAID, job.output())
    session.row(
        "arms", outcome=outcome, seconds=seconds, preflight=verdicts, steps=steps, said=ours
    )


def faults(session: Session) -> None:
    """Nodes 1 and 2 train; node 3 waits, and has the GPUs of node 2."""
    slurm, every = session.slurm, 100 if session.given.gpus else 4
    small = [f"--set=model.{one}" for one in SMALL.split()] if session.given.gpus else []
    second = f"{slurm.kind}2"
    job = session.submit(
        "faults", "--arm", "flux", f"--save-interval={every}", "--sbatch", "signal=B:USR1@60",
        "--sbatch", "time=60", "--set", "training.steps=100000", *small,
    )  # fmt: skip
    job.trains(every + 1)
    os.kill(job.ranks(second)[0], signal.SIGKILL)
    _goes_on(job, 1, "a rank is killed")
    job.trains(2 * every + 1)
    slurm.run("scontrol", "update", f"NodeName={second}", "State=DRAIN", "Reason=test")
    slurm.run("scontrol", "requeue", job.id)
    _goes_on(job, 2, "a node is drained")
    # Slurm rounds limits to minutes and may signal a minute early
    used = slurm.fields(job.id)["RunTime"].split(":")
    limit = int(used[0]) * 60 + int(used[1]) + 2
    slurm.run("scontrol", "update", f"JobId={job.id}", f"TimeLimit={limit}")
    _goes_on(job, 3, "the time limit is near")
    slurm.run("scancel", job.id)
    failures = (job.run / "flux" / "failures").read_text().splitlines()
    session.row("faults", outcome=job.reaches("CANCELLED"), failures=failures)


def _goes_on(job: Job, restarts: int, what: str) -> None:
    """The job queues again and makes a step; a row of what was done again, and its loss then."""
    began = time.monotonic()
    job.reaches(f"RUNNING {restarts}")
    queued_s, before = time.monotonic() - began, job.iterations()
    job.trains(1)
    _, step, _, loss = job.iterations()[len(before)]
    slurm = job.slurm
    nodes = slurm.run("scontrol", "show", "hostnames", slurm.fields(job.id)["NodeList"])
    job.session.row(
        what, running_again_s=round(queued_s, 1),
        training_again_s=round(time.monotonic() - began, 1),
        nodes_then=nodes.split(), last_step=before[-1][1], next_step=step, loss=loss,
        loss_before=[one[3] for one in before if one[1] == step][-1:],
    )  # fmt: skip


def ranks(session: Session) -> None:
    """One layer and two micro-batches for every rank, however many there are."""
    for count in session.given.ranks:
        tp, pp, dp = LAYOUTS[count]
        nodes = -(-count // 8)
        layout = {
            "cluster.nodes": nodes, "cluster.gpus_per_node": count // nodes,
            "cluster.memory_gib": 250, "parallel.tp": tp, "parallel.pp": pp, "parallel.dp": dp,
            "model.layers": pp, "model.heads": 8, "model.kv_heads": 8,
            "training.global_batch": 2 * dp, "training.micro_batch": 1,
            "training.steps": 3, "training.warmup_steps": 1,
        }  # fmt: skip
        options = [word for key in layout.items() for word in ("--set", "{}={}".format(*key))]
        job = session.submit(f"ranks-{count}", "--alternate", "0", *options)
        outcome = job.reaches("COMPLETED", "FAILED", within_s=session.given.limit_s)
        assert outcome == "COMPLETED 0", job.output()
        starts = re.findall(r"^(\S+) (\w+), start, ", job.output(), re.M)
        lines = job.iterations()
        for number, (began, arm) in enumerate(starts):
            steps = lines[3 * number : 3 * number + 3]
            at = datetime.fromisoformat(began).replace(tzinfo=None)
            first = (steps[0][0] - at).total_seconds() - steps[0][2] / 1000
            told = _told(session, job, 2 * number + 1)
            assert len(told) == count, f"{len(told)} of {count} ranks have told"
            session.row(
                "ranks", ranks=count, layout=f"TP {tp} x PP {pp} x DP {dp}", arm=arm,
                start_s=round(first, 1), steps_ms=[ms for _, _, ms, _ in steps],
                losses=[loss for *_, loss in steps],
                store_requests=sum(one["requests"] for one in told),
                store_bytes=sum(one["sent"] + one["received"] for one in told),
                rss_mib=round(max(one["rss_kib"] for one in told) / 1024),
                cpu_s=round(sum(one["cpu_s"] for one in told) / count, 1),
            )  # fmt: skip
    _killed_and_late(session, options, count)


def _told(session: Session, job: Job, step: int) -> list[dict[str, float]]:
    files = session.slurm.tells.glob(f"{job.id}.{step}.*")
    return [json.loads(file.read_text()) for file in files]


def _killed_and_late(session: Session, options: list[str], count: int) -> None:
    """Of the last number of ranks: one that stands still for a while, and one that dies."""
    long = ["--set", "training.steps=100000", "--arm", "flux", "--sbatch", "time=60"]
    job = session.submit("late-and-killed", *options, *long)
    job.trains(2, within_s=session.given.limit_s)
    rank = job.ranks(f"{session.slurm.kind}{-(-count // 8)}")[-1]
    os.kill(rank, signal.SIGSTOP)
    time.sleep(10)
    before = job.iterations()[-1][1]
    os.kill(rank, signal.SIGCONT)
    job.trains(before + 2)
    slowest = max(ms for _, _, ms, _ in job.iterations()[1:])
    session.row("a rank stands still for 10 s", ranks=count, slowest_ms=slowest)
    began = time.monotonic()
    os.kill(rank, signal.SIGKILL)
    job.reaches("PENDING 1", "RUNNING 1")
    seconds = round(time.monotonic() - began, 1)
    session.row("a rank is killed", ranks=count, seconds=seconds)
    session.slurm.run("scancel", job.id)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("arms", "faults", "ranks"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--megatron-lm", type=Path, required=True)
    parser.add_argument("--nodes", type=int, default=2, help="that train at once (arms, faults)")
    parser.add_argument("--gpus", type=int, default=0, help="of each node; 0: on the CPU")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32, 128])
    parser.add_argument("--experiment", help=f"by default {ON_GPUS}, or {ON_CPU} without GPUs")
    parser.add_argument("--limit-s", type=float, default=500, help="for one job")
    parser.add_argument("--commit", default="")
    given, given.options = parser.parse_known_args()
    given.out = given.out.resolve()
    given.out.mkdir(parents=True, exist_ok=True)
    nodes = given.nodes + (given.what == "faults")
    if given.what == "ranks":
        nodes = -(-max(given.ranks) // 8)
    firsts = [given.gpus * min(node, given.nodes - 1) for node in range(nodes)]
    here = torch.cuda.device_count()
    gpus = [
        [f"/dev/nvidia{(first + n) % here}" for n in range(given.gpus)]
        for first in (firsts if given.gpus else [])
    ]
    if given.gpus:
        there = {"cluster.nodes": given.nodes, "cluster.gpus_per_node": given.gpus}
        given.options += [word for key in there.items() for word in ("--set", "{}={}".format(*key))]
    # what `timeout` sends: the jobs end with us
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with SlurmCluster(given.out / "slurm", nodes, cpus=16, gpus=gpus, apart=True) as slurm:
        globals()[given.what](Session(slurm, given))


if __name__ == "__main__":
    main()
