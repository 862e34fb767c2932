"""A real Slurm takes the jobs of `flux-megatron launch`, runs one, and requeues it halfway.

docs/tests.md says what is real here and what is pretended.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2", reason="needs the extra `launch`")

from slurm_cluster import SOON, SlurmCluster
from typer.testing import CliRunner

from flux_megatron.cli import app
from flux_megatron.lab.train.run_folder import metrics
from flux_megatron.launch import experiment

# of many, because a requeue takes some seconds, and a step a third of one
STEPS, SAVE_INTERVAL, REQUEUED_AT = 20, 4, 6
GOING_WELL = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "COMPLETED"}
COMMAND = (sys.executable, "-m", "flux_megatron.cli")


@pytest.mark.parametrize("name", experiment.names())
def test_slurm_accepts_every_experiment(slurm, tmp_path, name):
    """On as many nodes as its cluster has, and not on one fewer."""
    job = written(name, tmp_path)
    cluster = next(iter(experiment.load(name).arms.values())).cluster
    partition = "cpu" if cluster.gpu == "cpu" else "gpu"
    accepted, nodes = planned(slurm, partition, job)
    assert accepted, nodes
    assert len(slurm.run("scontrol", "show", "hostnames", nodes).split()) == cluster.nodes
    all_but_too_few = f"{partition}[{cluster.nodes}-{slurm.nodes[partition]}]"
    accepted, reason = planned(slurm, partition, job, f"--exclude={all_but_too_few}")
    assert not accepted
    assert "Requested node configuration is not available" in reason


def written(name: str, folder: Path, *options: str) -> Path:
    """The job script of an experiment."""
    checkout, run = folder / "Megatron-LM", folder / "run"
    checkout.mkdir()
    (checkout / "pretrain_gpt.py").touch()
    where = ["--run-dir", str(run), "--megatron-lm", str(checkout)]
    done = CliRunner().invoke(app, ["launch", name, *where, *options])
    assert done.exit_code == 0, done.output
    return run / "job.sbatch"


def planned(slurm: SlurmCluster, partition: str, job: Path, *options: str) -> tuple[bool, str]:
    """Whether Slurm would run the job, and the nodes that it chose or the reason against it."""
    done = slurm.call("sbatch", "--test-only", f"--partition={partition}", *options, str(job))
    found = re.search(r"to start at \S+ using \d+ processors on nodes (\S+)", done.stderr)
    return done.returncode == 0, found[1] if found else done.stderr


# The doctor has tests of its own; here it would import torch on every node before the ranks do.
PYTHON = f"""#!/bin/sh
case "$*" in "-m flux_megatron.doctor "*) exit 0 ;; esac
exec {sys.executable} "$@"
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_requeued_job_goes_on_from_its_checkpoint(slurm, tmp_path):
    """Two nodes of two ranks, which are interrupted after step 6.

    The second start goes on from the newest checkpoint: the one that the ranks have still written
    on the signal to end, or, where Slurm had killed them before, one of SAVE_INTERVAL. Steps after
    it are repeated to the last bit, and no others.
    """
    pytest.importorskip("megatron.core", reason="needs the extra `train`")
    text, run, python = tmp_path / "text", tmp_path / "run", tmp_path / "python"
    text.mkdir()
    (text / "words.txt").write_text(" ".join(f"{i} is {i * i}." for i in range(3000)))
    python.write_text(PYTHON)
    python.chmod(0o755)
    (tmp_path / "site.yaml").write_text(f"python: {python}\n")
    job = slurm.run(
        *COMMAND, "launch", "cpu/tiny", "--submit", "--run-dir", str(run), "--arm", "flux",
        "--set", f"training.steps={STEPS}", "--set", "model.layers=1",
        "--save-interval", str(SAVE_INTERVAL), "--site", str(tmp_path / "site.yaml"),
        "--data-path", str(text), "--env", "GLOO_SOCKET_IFNAME=lo",
    ).strip()  # fmt: skip
    flux = run / "flux" / "train"
    try:
        slurm.wait_for(
            lambda: going_on(slurm, job) and len(metrics(flux)) >= REQUEUED_AT, 240, "steps"
        )
        slurm.run("scontrol", "requeue", job)
        slurm.wait_for(lambda: states(slurm, job)[job] == "PENDING", 60, "the requeue")
        first_start = metrics(flux)
        assert REQUEUED_AT <= len(first_start) < STEPS, "it was not halfway"
        # Slurm would let two minutes pass
        slurm.run("scontrol", "update", f"JobId={job}", SOON)
        slurm.wait_for(lambda: not going_on(slurm, job), 240, "the end")
        assert slurm.jobs(job)[job]["Restarts"] == "1"
        summary = json.loads((flux / "summary.json").read_text())
        checkpoint = summary["first_step"] - 1
        assert checkpoint == len(first_start) or checkpoint % SAVE_INTERVAL == 0 < checkpoint
        assert_continued(first_start, metrics(flux), checkpoint)
        assert summary["last_step"] == STEPS
        assert summary["overlapped"] == summary["eligible"] > 0
    except AssertionError as error:
        raise AssertionError(f"{error}\n{logs_of(run)}") from error


def states(slurm: SlurmCluster, job: str) -> dict[str, str]:
    return {task: fields["JobState"] for task, fields in slurm.jobs(job).items()}


def going_on(slurm: SlurmCluster, job: str) -> bool:
    """Whether a task is to run or runs; `AssertionError` as soon as one has failed."""
    found = states(slurm, job)
    assert set(found.values()) <= GOING_WELL, found
    return set(found.values()) != {"COMPLETED"}


def assert_continued(
    first: list[dict[str, Any]], whole: list[dict[str, Any]], checkpoint: int
) -> None:
    """`whole`, the rows after both starts, begins with those of the `first` start up to the
    checkpoint, times of the clock included, and repeats what the steps after it computed.
    """
    assert [row["step"] for row in whole] == list(range(1, STEPS + 1))
    assert whole[:checkpoint] == first[:checkpoint], "steps before the checkpoint were redone"
    for before, after in zip(first, whole, strict=False):
        for key in ("loss", "grad_norm", "lr"):
            assert before[key] == after[key], f"step {before['step']}, {key}"
    again = [row["seconds"] for row in whole[checkpoint : len(first)]]
    done = [row["seconds"] for row in first[checkpoint:]]
    assert not done or again != done, "nothing was done again"


def logs_of(run: Path) -> str:
    """The ends of what the job and its ranks wrote."""
    files = [*run.glob("slurm-*.out"), *sorted(run.glob("*/logs/**/*.log"))]
    texts = {file: file.read_text(errors="replace")[-3000:] for file in files}
    return "\n".join(f"{file.relative_to(run)}:\n{text}" for file, text in texts.items() if text)
