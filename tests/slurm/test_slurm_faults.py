"""A real Slurm and what goes wrong on one: bad nodes, ranks that crash or hang, arms in turn.

Ranks, GPUs and containers are pretended (pretended.py); jobs, requeues and signals are real.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pretended
import pytest
import yaml

pytest.importorskip("jinja2", reason="needs the extra `launch`")

from slurm_cluster import SlurmCluster, why_unavailable
from typer.testing import CliRunner

from flux_megatron.cli import app

STEPS = 12
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
# cpu/tiny as a cluster with GPUs, so that nodes are examined; nothing is expected of their speed,
# and Slurm is not asked for GPUs, which the nodes have not
ON_GPUS = [
    "--set",
    "cluster.gpu=H200-SXM5",
    "--set",
    "cluster.link.kind=nvlink",
    "--sbatch",
    "gres=none",
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    if reason := why_unavailable():
        pytest.skip(reason)
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


class Job:
    """A run of cpu/tiny with pretended ranks."""

    def __init__(self, slurm: SlurmCluster, folder: Path, **site: object) -> None:
        self.slurm, self.folder, self.run = slurm, folder, folder / "run"
        self.programs = {"python": pretended.PYTHON, "nvidia_smi": pretended.NVIDIA_SMI}
        self.site = {"python": "python", **site}
        self.id = ""

    def submit(self, *options: str) -> None:
        where = pretended.put(self.folder, **self.programs)
        site = self.folder / "site.yaml"
        site.write_text(yaml.safe_dump(self.site))
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

    def fields(self, task: str = "") -> dict[str, str]:
        return self.slurm.jobs(self.id)[self.id + task]

    def end(self, timeout_s: float = 60) -> None:
        """Wait for all tasks. Slurm would let two minutes pass before a requeued one starts.

        A job that queues itself again has ended for a moment, and may have failed for seconds where
        cores are busy: it is asked again.
        """
        try:
            self.slurm.wait_for(self._stays_ended, timeout_s, "the end of all tasks")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output()}") from error

    def _stays_ended(self) -> bool:
        asked = 0
        while self._ended():
            states = {fields["JobState"] for fields in self.slurm.jobs(self.id).values()}
            if asked >= (6 if "FAILED" in states else 1):
                return True
            time.sleep(1)
            asked += 1
        return False

    def _ended(self) -> bool:
        tasks = self.slurm.jobs(self.id)
        for task, fields in tasks.items():
            if fields["JobState"] == "PENDING" and fields["Reason"] == "BeginTime":
                self.slurm.call("scontrol", "update", f"JobId={task}", "StartTime=now")
        return {fields["JobState"] for fields in tasks.values()} <= ENDED

    def output(self) -> str:
        return "\n".join(file.read_text() for file in sorted(self.run.glob("slurm-*.out")))

    def trained(self) -> list[list[str]]:
        """Part, image and nodes of every start of ranks, in order."""
        return [line.split(" ") for line in (self.folder / "trained").read_text().splitlines()]


def test_arms_in_turn_on_the_same_nodes(slurm, tmp_path):
    """Two rounds; flux crashes once, goes on from its checkpoint, and nothing is done again."""
    job = Job(slurm, tmp_path)
    job.order("crash-flux", 1)
    job.submit("--alternate", "2")
    job.end()
    assert job.fields()["JobState"] == "COMPLETED", job.output()
    rounds = [
        "round-1/megatron",
        "round-1/flux",
        "round-1/flux",
        "round-2/megatron",
        "round-2/flux",
    ]
    assert [part for part, _, _ in job.trained()] == rounds
    assert job.fields()["Restarts"] == "1"
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
    job.end()
    assert job.fields("_0")["JobState"] == "COMPLETED", job.output()
    assert job.fields("_0")["ExcNodeList"] == "cpu1"
    assert [nodes for _, _, nodes in job.trained()] == ["cpu[2-3]"]
    verdict = "node cpu1: unfit: GPU 1: uncorrected ECC errors since the driver started: 5; not"
    assert verdict in job.output()
    assert "node cpu2: fit; not checked: all-reduce" in job.output()
    assert "queued again without cpu1" in job.output()


def test_crashes_queue_an_arm_again_within_a_bound(slurm, tmp_path):
    """The second arm never gets on; the first one, a task of the same array, is left alone."""
    job = Job(slurm, tmp_path, retries=1)
    job.order("crash-flux", 9)
    job.submit()
    job.end()
    stock, ours = job.fields("_0"), job.fields("_1")
    assert (stock["JobState"], stock["Restarts"]) == ("COMPLETED", "0"), job.output()
    assert (ours["JobState"], ours["Restarts"]) == ("FAILED", "1"), job.output()
    assert job.output().count("flux: ranks ended with code") == 2
    assert "not queued again: 2 failures without progress" in job.output()


def test_silent_ranks_say_where_they_are_and_queue_again(slurm, tmp_path):
    job = Job(slurm, tmp_path, silent_s=16)  # on busy cores a start is silent for seconds
    job.order("hang-flux", 1)
    job.submit("--arm", "flux")
    job.end(90)
    ended = job.fields("_0")["JobState"], job.fields("_0")["Restarts"]
    assert ended == ("COMPLETED", "1"), job.output()
    assert "flux: no rank has written a line for " in job.output()
    stacks = (job.run / "flux" / "logs" / "node-0" / "0" / "stderr.log").read_text()
    assert "in waits_for_another_rank" in stacks


def test_cancelled_job_does_not_queue_again(slurm, tmp_path):
    job = Job(slurm, tmp_path)
    job.order("hang-flux", 1)
    job.submit("--arm", "flux")
    slurm.wait_for(lambda: (tmp_path / "trained").exists(), 30, "the ranks")
    slurm.run("scancel", job.id)
    job.end()
    assert (job.fields("_0")["JobState"], job.fields("_0")["Restarts"]) == ("CANCELLED", "0")
    assert not (job.run / "flux" / "failures").exists()


@pytest.mark.parametrize("runtime", ["pyxis", "enroot"])
def test_every_arm_runs_in_its_image(slurm, tmp_path, runtime):
    images = {"image": "/images/stock.sqsh", "images": {"flux": "nvcr.io#nvidia/pytorch:25.06-py3"}}
    container = {"runtime": runtime, "mounts": ["/data:/d:ro"], **images}
    job = Job(slurm, tmp_path, container=container, srun={"quiet": None})
    job.programs |= {"enroot": pretended.ENROOT}
    if runtime == "pyxis":
        job.programs |= {"srun": pretended.SRUN}
    job.submit("--alternate", "1")
    job.end()
    assert job.fields()["JobState"] == "COMPLETED", job.output()
    images = {part: image for part, image, _ in job.trained()}
    assert images == {
        "round-1/megatron": "/images/stock.sqsh",
        "round-1/flux": "nvcr.io#nvidia/pytorch:25.06-py3",
    }
    started = (tmp_path / "enroot").read_text().splitlines()
    assert len(started) == 2 * 2 * 2  # arms, nodes, doctor and ranks
    assert all("/data:/d" in one and f"{job.run}:{job.run}" in one for one in started)
