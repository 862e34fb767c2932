"""command.sh of a node: what it needs of Slurm, what bounds it, and where it binds ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

pytest.importorskip("jinja2", reason="needs the extra `launch`")

from flux_megatron.launch import command_line, launching
from flux_megatron.launch.launching import Request

GPUS = ("cluster.gpu=H200-SXM5", "cluster.link.kind=nvlink")
OF_SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NODEID": "1",
    "SLURM_RESTART_COUNT": "0", "SLURMD_NODENAME": "second",
}  # fmt: skip
START = ("start", "10.0.0.1:20007")


class Node:
    """A node with these programs alone; `python` is pretended."""

    def __init__(self, folder: Path, python: str, programs: tuple[str, ...] = ()) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        for name in ("bash", "mkdir", "sleep", "timeout"):
            (folder / "bin" / name).symlink_to(str(shutil.which(name)))
        for name, text in (("python", python), *((one, "") for one in programs)):
            file = folder / "bin" / name
            file.write_text(f"#!/bin/bash\n{text}")
            file.chmod(0o755)
        site = folder / "site.yaml"
        site.write_text("python: python\n")
        request = Request("cpu/tiny", run=folder / "run", site=site, arms=("flux",), overrides=GPUS)
        launching.prepare(request).write()

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
        return subprocess.run(
            ["bash", str(self.folder / "run" / "flux" / "command.sh"), *arguments],
            env=kept | variables | {"PATH": str(self.folder / "bin"), "WORK": str(self.folder)},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip


RANKS = 'echo "$@" >"$WORK/ranks"\n'


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("name", OF_SLURM)
def test_a_variable_that_does_not_arrive_ends_the_script(tmp_path, name, empty):
    """Each node would start all ranks as node 0, or write the verdict of another one."""
    node = Node(tmp_path, RANKS)
    mode = ("preflight", str(tmp_path)) if name == "SLURMD_NODENAME" else START
    variables = OF_SLURM | {name: ""}
    if not empty:
        del variables[name]
    done = node.run(*mode, **variables)
    assert done.returncode != 0
    assert name in done.stderr
    assert not (tmp_path / "ranks").exists()


def test_examination_of_a_node_is_bounded_from_its_containers_start(tmp_path, monkeypatch):
    monkeypatch.setattr(command_line, "PREFLIGHT_S", 1)
    begun = time.monotonic()
    done = Node(tmp_path, "exec sleep 50").run("preflight", str(tmp_path), **OF_SLURM)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize("there", [True, False])
def test_ranks_are_bound_to_the_cpus_near_their_gpus(tmp_path, there):
    done = Node(tmp_path, RANKS, ("numactl",) if there else ()).run(*START, **OF_SLURM)
    assert done.returncode == 0, done.stderr
    given = (tmp_path / "ranks").read_text().split()
    assert ("--numa-binding=node" in given) is there
    assert ("no numactl here" in done.stderr) is not there
