"""A real Slurm takes the jobs of `flux-megatron launch`.

docs/tests.md says what is real here and what is pretended.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from pathlib import Path

import pytest

pytest.importorskip("jinja2", reason="needs the extra `launch`")

from slurm_cluster import SlurmCluster, why_unavailable
from typer.testing import CliRunner

from flux_megatron.cli import app
from flux_megatron.launch import experiment


def test_slurm_accepts_every_experiment(slurm, tmp_path):
    """What it asks for: as many nodes as its cluster has, and not one fewer."""
    asked: dict[str, tuple[Path, str]] = {}
    for name in experiment.names():
        job = written(name, tmp_path / name)
        lines = re.findall(r"^#SBATCH (?!--(?:job-name|output)=).*$", job.read_text(), re.M)
        asked["\n".join(lines)] = job, name
    for job, name in asked.values():
        cluster = next(iter(experiment.load(name).arms.values())).cluster
        partition = "cpu" if cluster.gpu == "cpu" else "gpu"
        accepted, nodes = planned(slurm, partition, job)
        assert accepted, nodes
        assert len(slurm.run("scontrol", "show", "hostnames", nodes).split()) == cluster.nodes
        all_but_too_few = f"{partition}[{cluster.nodes}-{slurm.nodes[partition]}]"
        accepted, reason = planned(slurm, partition, job, f"--exclude={all_but_too_few}")
        assert not accepted
        assert "Requested node configuration is not available" in reason


def test_a_node_of_this_machine_has_gpus_and_a_kernel_of_its_own(tmp_path):
    if reason := why_unavailable():
        pytest.skip(reason)
    files = [str(tmp_path / f"nvidia{number}") for number in range(2)]
    try:
        for file in files:
            os.mknod(file, stat.S_IFCHR | 0o666, os.makedev(1, 3))  # what /dev/null is
    except PermissionError:
        pytest.skip("only root makes device files")
    code = "import os; from flux_megatron.symm.places import machine"
    code += "; print(machine(), os.environ['CUDA_VISIBLE_DEVICES'])"
    with SlurmCluster(tmp_path / "slurm", gpus=[[file] for file in files], apart=True) as slurm:
        said = slurm.run("srun", "--nodes=2", "--gpus-per-node=1", sys.executable, "-c", code)
        assert sorted(said.splitlines()) == ["gpu1 0", "gpu2 1"]
        two = Path(__file__).with_name("gpu_nodes.yaml")
        accepted, nodes = planned(slurm, "gpu", written(str(two), tmp_path / "two"))
        assert (accepted, nodes) == (True, "gpu[1-2]")


def written(name: str, folder: Path) -> Path:
    """The job script of an experiment."""
    checkout, run = folder / "Megatron-LM", folder / "run"
    checkout.mkdir(parents=True)
    (checkout / "pretrain_gpt.py").touch()
    where = ["--run-dir", str(run), "--megatron-lm", str(checkout)]
    done = CliRunner().invoke(app, ["launch", name, *where])
    assert done.exit_code == 0, done.output
    return run / "job.sbatch"


def planned(slurm: SlurmCluster, partition: str, job: Path, *options: str) -> tuple[bool, str]:
    """Whether Slurm would run the job, and the nodes that it chose or the reason against it."""
    done = slurm.call("sbatch", "--test-only", f"--partition={partition}", *options, str(job))
    found = re.search(r"to start at \S+ using \d+ processors on nodes (\S+)", done.stderr)
    return done.returncode == 0, found[1] if found else done.stderr
