"""command.sh of a launch, alone on a node of a pretended Slurm; a whole job is in tests/slurm."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from launched import launch
from started import executable

from flux_megatron.launch import job, scripts

# torchrun, pretended: it tells its arguments, and starts one rank of its own
PYTHON = """
    case "$*" in
    "-m flux_megatron.doctor "*) exit 0 ;;
    "-m flux_megatron.preflight "*) exec sleep 50 ;;
    esac
    echo "$@" >"$WORK/ranks"
    [ "${RANK:-end}" != end ] || exit 0
    # a launcher dies of USR1 unless it ignores it
    (trap 'echo step_4 >"$WORK/latest"; exit 0' TERM; for _ in {1..1000}; do sleep 0.02; done) &
    echo ready >"$WORK/ready"
    wait
"""


class Slurm:
    """A pretended one, in which a job of two nodes and arm flux lies in a folder with a space."""

    def __init__(self, folder: Path) -> None:
        self.work, self.run, self.site = folder, folder / "a run", folder / "site.yaml"
        self.arm = self.run / "flux"
        self.put("python", PYTHON)
        self.site.write_text("python: python\n")
        self.launch("--arm", "flux")

    def put(self, name: str, text: str) -> None:
        executable(self.work / "bin" / name, f"#!/bin/bash\n{text}")

    def launch(self, *options: object) -> None:
        launch("cpu/tiny", "--run-dir", self.run, "--site", self.site, *options)

    def environment(self, **more: str) -> dict[str, str]:
        kept = {key: text for key, text in os.environ.items() if not key.startswith("SLURM")}
        path = f"{self.work / 'bin'}:{os.environ['PATH']}"
        return kept | {"PATH": path, "WORK": str(self.work)} | more

    def told(self, process: subprocess.Popen[bytes], number: int) -> int:
        """The exit code of a process that gets a signal when its ranks are ready."""
        try:
            deadline = time.monotonic() + 30
            while not (self.work / "ready").exists():
                assert time.monotonic() < deadline, "the ranks did not start"
                time.sleep(0.02)
            time.sleep(0.2)  # for the rank's trap
            process.send_signal(number)
            return process.wait(timeout=30)
        finally:
            process.kill()

    def ranks(self) -> str:
        """What the Python of a node was called with; empty if it was not."""
        file = self.work / "ranks"
        return file.read_text().strip() if file.exists() else ""


@pytest.fixture
def slurm(tmp_path):
    return Slurm(tmp_path)


def test_resumed_launch_goes_on(slurm):
    """What failed is forgotten, and what is done goes on where it gets more steps."""
    for steps in (20, 30):
        for name in ("failures", "done"):
            (slurm.arm / name).touch()
        slurm.launch("--resume", "--set", f"training.steps={steps}")
        assert not (slurm.arm / "failures").exists()
        assert (slurm.arm / "done").exists() is (steps == 20)


def test_a_run_is_not_resumed_under_the_job_that_trains_it(slurm, monkeypatch, capfd):
    """Its nodes read the run's files whenever they start again."""
    (slurm.run / "job").write_text("7\n")
    monkeypatch.setenv("PATH", slurm.environment()["PATH"])
    before = (slurm.run / "job.sbatch").read_text()
    for state, code in (("RUNNING", 2), ("PENDING", 2), ("COMPLETED", 0)):
        known = f'echo "JobId=7 JobState={state} Reason=None"'
        slurm.put("scontrol", f'[ "$4" != 7 ] || {known}; echo "Invalid job id" >&2')
        grown = "--resume", "--set", "training.steps=30"
        said = launch("cpu/tiny", "--run-dir", slurm.run, "--site", slurm.site, *grown, code=code)
        assert ("job 7 trains" in said) is (code == 2)
        assert ((slurm.run / "job.sbatch").read_text() == before) is (code == 2)
    assert not capfd.readouterr().err, "Slurm forgets jobs"
    monkeypatch.setattr(job, "ANSWER_S", 0.1)
    slurm.put("scontrol", "exec sleep 20")
    began = time.monotonic()
    slurm.launch("--resume")
    assert time.monotonic() - began < 10


# --- command.sh of a node

OF_SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NODEID": "1",
    "SLURM_RESTART_COUNT": "0", "SLURMD_NODENAME": "second",
}  # fmt: skip


@pytest.fixture
def node(slurm, monkeypatch):
    """A function that runs command.sh on a node with GPUs, with the programs that it needs."""
    monkeypatch.setattr(scripts, "PREFLIGHT_S", 1)
    slurm.run = slurm.work / "on GPUs"
    slurm.launch("--arm", "flux", "--set", "cluster.gpu=H200-SXM5", "--set",
                 "cluster.link.kind=nvlink")  # fmt: skip
    for name in ("bash", "env", "mkdir", "sleep", "timeout"):
        (slurm.work / "bin" / name).symlink_to(str(shutil.which(name)))

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(slurm.work / "bin"), "WORK": str(slurm.work), **variables}
        script = ["bash", str(slurm.run / "flux" / "command.sh"), *arguments]
        return subprocess.run(script, env=environment, capture_output=True, text=True, timeout=60)

    return run


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("name", OF_SLURM)
def test_a_variable_that_does_not_arrive_ends_the_script(tmp_path, slurm, node, name, empty):
    """Each node would start all ranks as node 0, or write the verdict of another one."""
    mode = ("preflight", str(tmp_path)) if name == "SLURMD_NODENAME" else ("start", "10.0.0.1:9")
    variables = OF_SLURM | {name: ""}
    if not empty:
        del variables[name]
    done = node(*mode, **variables)
    assert done.returncode != 0
    assert name in done.stderr
    assert not slurm.ranks()


def test_examination_of_a_node_is_bounded_from_its_containers_start(tmp_path, node):
    begun = time.monotonic()
    done = node("preflight", str(tmp_path), **OF_SLURM)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize("there", [True, False])
def test_ranks_are_started_and_bound_to_the_cpus_near_their_gpus(slurm, node, there):
    if there:
        slurm.put("numactl", "")
    done = node("start", "10.0.0.1:20007", **OF_SLURM)
    assert done.returncode == 0, done.stderr
    given, arm = slurm.ranks(), slurm.run / "flux"
    assert ("--numa-binding=node" in given) is there
    assert ("no numactl here" in done.stderr) is not there
    assert given.startswith("-m torch.distributed.run --nnodes=2 --nproc-per-node=2 ")
    assert " --rdzv-backend=static --rdzv-endpoint=10.0.0.1:20007 --rdzv-id=7-0 " in given
    assert " --node-rank=1 " in given
    assert f" --log-dir={arm}/logs/node-1 " in given
    assert given.endswith(f"-m flux_megatron.cli train --config {arm}/train.yaml --out {arm}/train")
    assert (arm / "logs" / "node-1").is_dir()


# What scripts of conda and modules do, and may: all of it ends a shell with `set -euo pipefail`.
FOREIGN = """
[ $# -eq 0 ] || echo "given: $*"
echo "not set: $NOT_SET"
false
false | true
declare -A of_site=([key]=value)
grep -q no /dev/null
export SET_BY_SITE="${of_site[key]}"
"""


def site_of(slurm: Slurm, *setup: str, **more: object) -> None:
    slurm.site.write_text(yaml.safe_dump({"python": "python", "setup": [*setup], **more}))
    slurm.run = slurm.work / "another run"
    slurm.launch("--arm", "flux")


def start(slurm: Slurm, mode: str = "start", **more: str) -> subprocess.CompletedProcess[str]:
    script = ["bash", str(slurm.run / "flux" / "command.sh"), mode, "10.0.0.1:9"]
    environment = slurm.environment(**OF_SLURM, **more)
    return subprocess.run(script, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("mode", ["doctor", "start"])
def test_lines_of_a_site_run_as_in_a_new_shell(slurm, mode):
    (slurm.work / "foreign.sh").write_text(FOREIGN)
    slurm.put("python", 'echo "$SET_BY_SITE, ${multi-}, $*"')
    lines = (f". '{slurm.work}/foreign.sh'", "if true; then\n    export multi=lines\nfi\n")
    site_of(slurm, *lines)
    done = start(slurm, mode)
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert first == "not set: "
    assert last.startswith("value, lines, -m ")
    assert ("10.0.0.1:9" in last) is (mode == "start")


def test_a_line_of_a_site_that_fails_is_named_and_ends_the_job(slurm):
    site_of(slurm, "true", "module load 'of none'", 'touch "$WORK/later"')
    done = start(slurm)
    assert done.returncode == 1
    error = "setup: 'module load 'of none'' of the site ended with code 127"
    assert error in done.stderr
    assert not (slurm.work / "later").exists()
    assert not slurm.ranks()


def test_variables_of_a_site_reach_ranks_and_no_shell(slurm):
    """Bash cannot set UID; the others are names of the script too."""
    names = {"UID": "7", "node": "3", "folder": "x y", "mode": "$(exit 3) \\ 'é'\n;"}
    show = "; ".join(f"printenv {name}" for name in names)
    slurm.put("python", f'{{ {show}; }} >"$WORK/seen"; PATH=/usr/bin:/bin')
    site_of(slurm, environment=names)
    done = start(slurm)
    assert done.returncode == 0, done.stderr
    assert (slurm.work / "seen").read_text() == "".join(f"{text}\n" for text in names.values())
    assert (slurm.run / "flux" / "logs" / "node-1").is_dir()


HANGS = """
import os, pathlib, time
def waits_for_another_rank():
    pathlib.Path(os.environ["WORK"], "ready").touch()
    time.sleep(60)
waits_for_another_rank()
"""
NO_RANK = 'echo ready >"$WORK/ready"; exec sleep 3'
RANK = f"{sys.executable} -c {shlex.quote(HANGS)} & wait"
ORDERS = [
    (PYTHON, signal.SIGUSR1, ""),
    (NO_RANK, signal.SIGUSR1, "no rank to send TERM to: "),
    (RANK, signal.SIGUSR2, "in waits_for_another_rank"),
]


@pytest.mark.parametrize(("python", "order", "said"), ORDERS, ids=["stop", "nobody", "hang"])
def test_ranks_get_orders_without_pkill(slurm, node, python, order, said):
    """Many containers have none. They save and end, or write where they hang; an order that nobody
    gets is said.
    """
    slurm.put("python", python)
    script = ["bash", str(slurm.run / "flux" / "command.sh"), "start", "10.0.0.1:9"]
    environment = {"PATH": str(slurm.work / "bin"), "WORK": str(slurm.work), "RANK": "waits"}
    with (slurm.work / "shown").open("wb") as output:
        ranks = subprocess.Popen(script, env=environment | OF_SLURM, stderr=output)
    assert slurm.told(ranks, order) == 0
    assert (slurm.work / "latest").exists() is (not said)
    assert said in (slurm.work / "shown").read_text()
