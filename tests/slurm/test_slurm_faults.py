"""A real Slurm and what goes wrong on one: bad nodes, crashes, the time limit, arms in turn.

Ranks and GPUs are pretended (pretended.py); jobs, requeues and signals are real.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pretended
import pytest

pytest.importorskip("jinja2", reason="needs the extra `launch`")

from slurm_cluster import SlurmCluster
from typer.testing import CliRunner

from flux_megatron.cli import app

STEPS = 12
# cpu/tiny as a cluster with GPUs, so that nodes are examined; nothing is expected of their speed,
# and Slurm is not asked for GPUs, which the nodes have not
ON_GPUS = ["--set", "cluster.gpu=H200-SXM5", "--set", "cluster.link.kind=nvlink"]
ON_GPUS += ["--sbatch", "gres=none"]


class Job:
    """A run of cpu/tiny with pretended ranks."""

    def __init__(self, slurm: SlurmCluster, folder: Path) -> None:
        self.slurm, self.folder, self.run = slurm, folder, folder / "run"
        self.id = ""

    def submit(self, *options: str) -> None:
        where = pretended.put(self.folder)
        site = self.folder / "site.yaml"
        site.write_text("python: python\n")
        given = ["launch", "cpu/tiny", "--submit", "--run-dir", str(self.run), "--site", str(site)]
        environment = self.slurm.environment | {
            "PATH": f"{where}:{self.slurm.environment['PATH']}",
            "WORK": str(self.folder), "RUN": str(self.run), "STEPS": str(STEPS),
        }  # fmt: skip
        done = CliRunner().invoke(app, [*given, *options], env=environment)
        assert done.exit_code == 0, done.output
        self.id = done.output.strip()

    def order(self, fault: str, times: int) -> None:
        (self.folder / fault).write_text(f"{times}\n")

    def ends(self, outcome: str, timeout_s: float = 90) -> None:
        """Wait until the job is as told, and still is so a second later: "COMPLETED 1".

        That is its state and how often it was queued again.
        """

        def stays_ended() -> bool:
            return self._outcome() == outcome and not time.sleep(1) and self._outcome() == outcome

        try:
            self.slurm.wait_for(stays_ended, timeout_s, outcome)
        except AssertionError as error:
            raise AssertionError(f"{self._outcome()}: {error}\n{self.output()}") from error

    def hangs(self) -> None:
        """Wait until a rank does."""
        hangs = self.folder / "hangs"
        self.slurm.wait_for(lambda: self._outcome() and hangs.exists(), 90, "the ranks")
        hangs.unlink()

    def _outcome(self) -> str:
        return self.slurm.outcome(self.id)

    def output(self) -> str:
        return "\n".join(file.read_text() for file in sorted(self.run.glob("slurm-*.out")))

    def trained(self) -> list[list[str]]:
        """Part and nodes of every start of ranks, in order."""
        return [line.split(" ") for line in (self.folder / "trained").read_text().splitlines()]


def test_arms_in_turn_on_the_same_nodes(slurm, tmp_path):
    """Two rounds, whatever happens: the time limit, of which Slurm tells the batch process alone,
    which tells the ranks; `scontrol requeue`; a crash. Nothing is done again.
    """
    job = Job(slurm, tmp_path)
    job.order("hang-megatron", 2)
    job.order("crash-flux", 1)
    job.submit()
    job.hangs()
    slurm.run("scancel", "--batch", "--signal=USR1", job.id)
    job.hangs()
    assert not (job.run / "round-1" / "megatron" / "failures").exists()
    slurm.run("scontrol", "requeue", job.id)
    job.ends("COMPLETED 3")
    failure = (job.run / "round-1" / "megatron" / "failures").read_text()
    assert failure.endswith("round-1/flux: ranks of cpu1 ended with code 7\n")
    starts = [(1, "megatron")] * 3 + [(1, "flux")] * 2 + [(2, "megatron"), (2, "flux")]
    assert [part for part, _ in job.trained()] == [f"round-{one}/{arm}" for one, arm in starts]
    rows = (job.run / "round-1" / "flux" / "train" / "metrics.jsonl").read_text().splitlines()
    # three steps, and from the checkpoint of step 2 on
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3, *range(3, STEPS + 1)]
    done = CliRunner().invoke(app, ["results", str(job.run)])
    assert done.exit_code == 0, done.output
    speedups = [line.split() for line in done.output.splitlines() if "flux over megatron" in line]
    assert [line[0] for line in speedups] == ["1", "2", "all"], done.output


def test_unfit_node_is_named_and_excluded(slurm, tmp_path):
    job = Job(slurm, tmp_path)
    job.order("ecc-cpu1", 5)
    job.submit("--arm", "flux", *ON_GPUS)
    job.ends("COMPLETED 1")
    assert slurm.fields(job.id)["ExcNodeList"] == "cpu1"
    assert [nodes for _, nodes in job.trained()] == ["cpu[2-3]"]
    verdict = "node cpu1: unfit: GPU 1: uncorrected ECC errors since the driver started: 5; not"
    assert verdict in job.output()
    assert "node cpu2: fit; not checked: all-reduce" in job.output()
    assert "queued again without cpu1" in job.output()


def test_cancelled_job_does_not_queue_again(slurm, tmp_path):
    job = Job(slurm, tmp_path)
    job.order("hang-flux", 1)
    job.submit("--arm", "flux")
    # Slurm's linuxproc loses a process that starts while its parent is killed, and waits for it
    job.hangs()
    slurm.run("scancel", job.id)
    job.ends("CANCELLED 0")
    assert not (job.run / "flux" / "failures").exists()
