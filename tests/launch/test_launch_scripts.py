"""The scripts of a launch: what they contain, and what they do under a pretended Slurm."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

pytest.importorskip("jinja2", reason="needs the extra `launch`")

from flux_megatron.launch import experiment, launching
from flux_megatron.launch.errors import LaunchError
from flux_megatron.launch.launching import Request

NAMES = experiment.names()

# What the scripts call, pretended: they run what the real ones would, on one machine.
PROGRAMS = {
    # every node, and their worst exit code; USR1 goes to all processes of all nodes
    "srun": """
        while [[ $1 == --* ]]; do shift; done
        pids=()
        for node in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do
            SLURM_NODEID=$node setsid "$@" &
            pids+=($!)
        done
        trap 'kill -USR1 -- "${pids[@]/#/-}"; again=yes' USR1
        code=0
        for pid in "${pids[@]}"; do
            again=yes
            while [ "$again" = yes ]; do again=no; wait "$pid"; last=$?; done
            [ "$last" -le "$code" ] || code=$last
        done
        exit "$code"
    """,
    "scontrol": """
        case "$*" in
        "show hostnames "*) printf 'first\\nsecond\\n' ;;
        *"show node first") echo "NodeName=first NodeAddr=10.0.0.1 NodeHostName=first" ;;
        *"show job "*) echo "JobId=10007 JobState=${STATE:-RUNNING} ExcNodeList=(null)" ;;
        "requeue "*) echo "$2" >>"$WORK/requeued" ;;
        *) exit 9 ;;
        esac
    """,
    # the doctor says $DOCTOR; torchrun tells its arguments, and starts one rank of its own
    "python": """
        case "$*" in
        "-m flux_megatron.doctor "*) exit "${DOCTOR:-0}" ;;
        esac
        printf '%s\\n' "$@" >"$WORK/ranks-$SLURM_NODEID-${SLURM_RESTART_COUNT:-0}"
        [ "${RANK:-end}" != end ] || exit "${CODE:-0}"
        # a launcher dies of USR1 unless it ignores it
        (trap 'echo step_4 >"$WORK/latest"; exit 0' TERM; for _ in {1..1000}; do sleep 0.02; done) &
        echo ready >"$WORK/ready-$SLURM_NODEID"
        wait
    """,
}


def prepared(run: Path, name: str = "cpu/tiny", **more: object) -> launching.Prepared:
    return launching.prepare(Request(experiment=name, run=run, **more))  # type: ignore[arg-type]


def directives(job: str) -> dict[str, str | None]:
    """The options of the #SBATCH lines."""
    found = re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", job, re.M)
    return {name: value or None for name, value in found}


@pytest.mark.parametrize("name", NAMES)
def test_scripts_are_bash(name, tmp_path):
    made = prepared(tmp_path / "a run", name, checkout=tmp_path / "Megatron LM's")
    for script in (made.job, *(command.script() for command in made.commands)):
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        if shutil.which("shellcheck"):
            check = ["shellcheck", "--severity=warning", "--shell=bash", "-"]
            done = subprocess.run(check, input=script, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout


def test_one_job_trains_all_arms(tmp_path):
    made = prepared(tmp_path, "paper/gpt3-175b_a100-pcie", save_interval=10)
    options = directives(made.job)
    assert "array" not in options
    once = "round-{0}/megatron round-{0}/te round-{0}/flux"
    assert f"arms=({once.format(1)} {once.format(2)}) " in made.job
    assert options["time"] == "04:00:00"
    assert (options["nodes"], options["gpus-per-node"]) == ("16", "8")
    assert options["ntasks-per-node"] == "1"
    assert {"exclusive", "requeue"} <= options.keys()
    assert options["mem"] == "0"
    assert options["open-mode"] == "append"
    assert " --mpi=none " in made.job
    assert options["signal"] == "B:USR1@300"
    assert options["output"] == f"{tmp_path}/slurm-%j.out"
    two = prepared(tmp_path, "paper/gpt3-175b_a100-pcie", arms=("flux", "megatron"))
    assert "arms=(round-1/megatron round-1/flux round-2/megatron round-2/flux) " in two.job
    # without checkpoints an arm that is done is kept
    assert directives(two.job)["signal"] == "B:USR1@300"
    one = prepared(tmp_path, "paper/gpt3-175b_a100-pcie", arms=("flux",))
    assert "arms=(flux) " in one.job
    # nothing could be saved before the time limit
    assert "signal" not in directives(one.job)


def test_cpu_job_asks_for_no_gpus(tmp_path):
    assert not directives(prepared(tmp_path).job).keys() & {"gpus-per-node", "exclusive", "mem"}


def test_site_options_stand_instead_of_ours(tmp_path):
    file = tmp_path / "site.yaml"
    file.write_text(
        "python: /env/bin/python\n"
        "setup: [module load cuda]\n"
        "environment: {NCCL_SOCKET_IFNAME: ib0}\n"
        "sbatch: {partition: a100, exclusive: null, nodes: 16, gres: 'gpu:8'}\n"
    )
    options = ("account=me", "partition=b", "comment=hello there", "reservation")
    made = prepared(tmp_path, "paper/gpt3-175b_a100-pcie", site=file, sbatch=options,
                    environment=("A=b c",))  # fmt: skip
    found = directives(made.job)
    expected = {"partition": "b", "account": "me", "nodes": "16", "gres": "gpu:8",
                "comment": '"hello there"', "reservation": None}  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert "gpus-per-node" not in found
    script = made.commands[0].script()
    assert "\nmodule load cuda\n" in script
    assert "\nexport NCCL_SOCKET_IFNAME=ib0\nexport A='b c'\n" in script
    assert "\npython=/env/bin/python\n" in script


@pytest.mark.parametrize("name", ["paper/gpt3-175b_a100-pcie", "cpu/tiny"])
def test_the_site_s_variables_come_last(name, tmp_path):
    given = ("OMP_NUM_THREADS=7", "CUDA_DEVICE_MAX_CONNECTIONS=8")
    for command in prepared(tmp_path, name, environment=given).commands:
        found = command.environment
        assert (found["OMP_NUM_THREADS"], found["CUDA_DEVICE_MAX_CONNECTIONS"]) == ("7", "8")
        assert found["PYTHONUNBUFFERED"] == "1"


def test_the_arguments_of_an_arm_reach_its_command(tmp_path):
    file = tmp_path / "more.yaml"
    file.write_text(
        f"base: {experiment.find('paper/gpt3-175b_a100-pcie')[1]}\n"
        "arguments: [--log-throughput]\n"
        "arms: {flux: {arguments: [--flux-strict]}}\nassumed: {arguments arms: test}\n"
    )
    made = prepared(tmp_path / "run", str(file), data=("/d/a",), save_interval=10)
    for command in made.commands:
        more = ["--log-throughput", *["--flux-strict"] * (command.arm == "flux")]
        assert command.arguments[-len(more) :] == more
        assert all(option in command.script() for option in more)
        said = " ".join(command.arguments)
        assert "--data-path /d/a" in said
        assert f"--save {command.folder}/checkpoints --save-interval 10" in said
        assert command.on_resume


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pyhton: x", "pyhton: Extra inputs"),
        ("sbatch: [a]", "sbatch: Input should be a valid dict"),
        ("- a", "a mapping expected, list given"),
        (": :", "while parsing"),
    ],
)
def test_wrong_site_file_is_refused(tmp_path, text, expected):
    file = tmp_path / "site.yaml"
    file.write_text(text)
    with pytest.raises(LaunchError, match=re.escape(str(file))) as refusal:
        prepared(tmp_path, site=file)
    assert expected in str(refusal.value)


class Slurm:
    """A pretended one, in which a job of two nodes and arm flux lies in a folder with a space."""

    def __init__(self, folder: Path, **more: object) -> None:
        self.work, self.run = folder, folder / "a run"
        (folder / "bin").mkdir()
        for name, text in PROGRAMS.items():
            file = folder / "bin" / name
            file.write_text(f"#!/usr/bin/env bash\n{text}")
            file.chmod(0o755)
        site = folder / "site.yaml"
        site.write_text("python: python\n")
        self.made = prepared(self.run, site=site, **{"arms": ("flux",), **more})
        self.job = self.made.write()

    def environment(self, **more: str) -> dict[str, str]:
        path = f"{self.work / 'bin'}:{os.environ['PATH']}"
        slurm = {"JOB_ID": "10007", "JOB_NUM_NODES": "2", "JOB_NODELIST": "some[1-2]"}
        named = {f"SLURM_{name}": value for name, value in slurm.items()}
        return os.environ | {"PATH": path, "WORK": str(self.work)} | named | more

    def start(self, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(self.job)], env=self.environment(**more), capture_output=True, text=True,
            timeout=60,
        )  # fmt: skip

    def ranks(self, node: int, restart: int = 0) -> list[str]:
        """What the Python of a node was called with."""
        return (self.work / f"ranks-{node}-{restart}").read_text().splitlines()


@pytest.fixture
def slurm(tmp_path):
    return Slurm(tmp_path)


def test_nodes_meet_at_the_address_of_the_first(slurm):
    done = slurm.start()
    assert done.returncode == 0, done.stderr
    for node in (0, 1):
        given = slurm.ranks(node)
        assert given[:2] == ["-m", "torch.distributed.run"]
        assert {"--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=static"} <= {*given}
        assert "--rdzv-endpoint=10.0.0.1:20007" in given
        assert f"--node-rank={node}" in given
        assert f"--log-dir={slurm.run}/flux/logs/node-{node}" in given
        program = given[given.index("flux_megatron.cli") :]
        assert program == ["flux_megatron.cli", "train", "--config", f"{slurm.run}/flux/train.yaml",
                           "--out", f"{slurm.run}/flux/train"]  # fmt: skip
        assert (slurm.run / "flux" / "logs" / f"node-{node}").is_dir()


def test_every_requeue_resumes(slurm):
    assert slurm.start(CODE="7").returncode == 7
    for restart in (1, 2):
        assert slurm.start(SLURM_RESTART_COUNT=str(restart), CODE="7").returncode == 7
        given = slurm.ranks(1, restart)
        assert given[-1] == "--resume"
        assert f"--rdzv-id=10007-{restart}" in given
    assert "--resume" not in slurm.ranks(1)


def test_requeue_before_the_ranks_started_starts_them(slurm):
    assert slurm.start(SLURM_RESTART_COUNT="1").returncode == 0
    assert "--resume" not in slurm.ranks(1, 1)


def test_what_is_done_is_not_done_again(slurm):
    assert slurm.start().returncode == 0
    assert slurm.start(SLURM_RESTART_COUNT="1").returncode == 0
    assert not (slurm.work / "ranks-0-1").exists()


def test_job_does_not_start_twice(slurm):
    assert slurm.start().returncode == 0
    again = slurm.start()
    assert again.returncode == 2
    assert f"{slurm.run}/flux was started before" in again.stderr


def test_resumed_launch_goes_on(slurm):
    """What failed is forgotten, and what is done goes on where it gets more steps."""
    for code, steps in ((7, 20), (0, 20), (0, 30)):
        assert slurm.start(CODE=str(code)).returncode == code
        request = Request("cpu/tiny", run=slurm.run, resume=True, site=slurm.work / "site.yaml",
                          overrides=(f"training.steps={steps}",))  # fmt: skip
        launching.prepare(request).write()
        assert (slurm.run / "flux" / "done").exists() is (code == 0 and steps == 20)
    assert not (slurm.run / "flux" / "failures").exists()
    assert slurm.ranks(0)[-1] == "--resume"


def test_unfit_node_stops_the_job_before_it_starts(slurm):
    done = slurm.start(DOCTOR="1")
    assert done.returncode == 1
    assert "a node is not fit to start" in done.stderr
    assert not (slurm.work / "ranks-0-0").exists()
    assert slurm.start().returncode == 0


def test_ranks_that_fail_queue_the_job_again_within_a_bound(slurm):
    """Twice without progress; a checkpoint counts as progress. The task alone is meant."""
    requeued, latest = (
        slurm.work / "requeued",
        slurm.run / "flux" / "train" / "checkpoints" / "latest",
    )
    for restart, times in enumerate((1, 2, 2)):
        assert slurm.start(CODE="7", SLURM_RESTART_COUNT=str(restart)).returncode == 7
        assert requeued.read_text() == "10007\n" * times
    latest.parent.mkdir(parents=True)
    latest.write_text("step_4\n")
    log = slurm.start(CODE="7", SLURM_RESTART_COUNT="3").stdout
    assert "flux: ranks ended with code 7" in log
    assert requeued.read_text() == "10007\n" * 3


def test_cancelled_job_does_not_queue_again(slurm):
    assert slurm.start(CODE="7", STATE="CANCELLED").returncode == 7
    assert not (slurm.work / "requeued").exists()


def test_ranks_save_before_the_time_limit_and_the_job_queues_again(slurm):
    (slurm.run / "flux" / "train" / "checkpoints").mkdir(parents=True)
    (slurm.run / "flux" / "train" / "checkpoints" / "latest").symlink_to(slurm.work / "latest")
    assert near_time_limit(slurm) == 0
    assert (slurm.work / "latest").read_text() == "step_4\n"
    assert (slurm.work / "requeued").read_text() == "10007\n"


def test_job_that_cannot_save_does_not_queue_again(slurm):
    """It would go round and round."""
    assert near_time_limit(slurm) == 1
    assert not (slurm.work / "requeued").exists()


def near_time_limit(slurm: Slurm) -> int:
    """The code of a job that Slurm tells, in its batch shell alone, of its time limit."""
    job = subprocess.Popen(["bash", str(slurm.job)], env=slurm.environment(RANK="waits"))
    try:
        deadline = time.monotonic() + 30
        while not all((slurm.work / f"ready-{node}").exists() for node in (0, 1)):
            assert time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.02)
        time.sleep(0.1)  # for the rank's trap
        job.send_signal(signal.SIGUSR1)
        return job.wait(timeout=30)
    finally:
        job.kill()


def test_one_node_needs_no_slurm(slurm):
    script = slurm.run / "flux" / "command.sh"
    environment = {k: v for k, v in slurm.environment().items() if not k.startswith("SLURM")}
    # the pretended Python names its file after the node
    environment |= {"SLURM_NODEID": "0"}
    done = subprocess.run(["bash", str(script), "start"], env=environment)
    assert done.returncode == 0
    given = slurm.ranks(0)
    assert {"--nnodes=1", "--nproc-per-node=4", "--rdzv-endpoint=127.0.0.1:0"} <= {*given}
    assert {"--rdzv-backend=c10d", "--local-addr=127.0.0.1"} <= {*given}
