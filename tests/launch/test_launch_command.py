"""`flux-megatron launch`: what it prints, writes and refuses, on machines without torch too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jinja2", reason="needs the extra `launch`")

from typer.testing import CliRunner

from flux_megatron.cli import app
from flux_megatron.launch import experiment, local, run_folder, sbatch
from flux_megatron.launch.errors import LaunchError

GPT = "paper/gpt3-175b_a100-pcie"
WITHOUT = ("torch", "triton", "numpy", "megatron", "matplotlib")


def run(*arguments: object, code: int = 0) -> str:
    """The output of a launch that ends with `code`."""
    done = CliRunner().invoke(app, ["launch", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture
def checkout(tmp_path):
    """As much of Megatron-LM as a launch looks at."""
    folder = tmp_path / "Megatron-LM"
    (folder / "megatron" / "core").mkdir(parents=True)
    (folder / "pretrain_gpt.py").touch()
    info = folder / "megatron" / "core" / "package_info.py"
    info.write_text("MAJOR = 0\nMINOR = 16\nPATCH = 1\n")
    return folder


@pytest.mark.parametrize("name", [GPT, "cpu/tiny"])
def test_dry_run_needs_no_torch_and_writes_nothing(name, tmp_path):
    blocked = "".join(f"sys.modules[{module!r}] = None; " for module in WITHOUT)
    code = f"import sys; {blocked}from flux_megatron.cli import app; app()"
    done = subprocess.run(
        [sys.executable, "-c", code, "launch", name, "--dry-run"], cwd=tmp_path,
        capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = [line for line in done.stdout.splitlines() if line.startswith("## arm ")]
    arms = experiment.load(name).arms
    assert shown == [f"## arm round-{one}/{arm}" for one in (1, 2) for arm in arms]
    for shown in ("CUDA_DEVICE_MAX_CONNECTIONS=1", "-m torch.distributed.run --nnodes=",
                  "#SBATCH --open-mode=append", "after a requeue"):  # fmt: skip
        assert shown in done.stdout
    if name == GPT:
        assert "\n    --tensor-model-parallel-size 8\n" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_run_folder_holds_the_experiment_as_it_was_resolved(tmp_path, checkout):
    folder = tmp_path / "a run"
    given = ("--set", "training.micro_batch=1", "--arm", "flux", "--arm", "te")
    assert str(folder / "job.sbatch") in run(
        GPT, "--run-dir", folder, "--megatron-lm", checkout, *given
    )
    whole = experiment.load(GPT, {"training.micro_batch": 1})
    first, second = folder / "round-1", folder / "round-2"
    kept = run_folder.read(first)
    assert run_folder.read(second) == kept
    assert kept.arms == {arm: whole.arms[arm] for arm in ("te", "flux")}
    assert [*kept.arms] == ["te", "flux"]
    assert (kept.name, kept.program, kept.stated) == (whole.name, whole.program, whole.stated)
    assert kept.assumed["training.micro_batch"] == "set by the caller"
    record = json.loads((first / "experiment.json").read_text())
    assert record["request"]["rounds"] == 2
    assert record["request"]["overrides"] == ["training.micro_batch=1"]
    assert record["request"]["checkout"] == str(checkout)
    assert "--flux-overlap" in record["arguments"]["flux"]
    assert {file.name for file in folder.iterdir()} == {"job.sbatch", "round-1", "round-2"}
    for one in (first, second):
        assert {file.name for file in one.iterdir()} == {"experiment.json", "flux", "te"}
    assert (folder / "job.sbatch").read_text().startswith("#!/usr/bin/env bash\n#SBATCH ")


def test_data_is_found_from_another_folder(tmp_path, checkout, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.idx").touch()
    data = ("--data-path", "0.3", "--data-path", "text")
    run(GPT, *data, "--run-dir", "run", "--megatron-lm", checkout)
    record = json.loads((tmp_path / "run" / "round-1" / "experiment.json").read_text())
    given = record["arguments"]["te"]
    assert given[given.index("--data-path") + 1 :][:2] == ["0.3", str(tmp_path / "text")]
    run("cpu/tiny", "--data-path", "run", "--run-dir", "other")
    config = tmp_path / "other" / "round-2" / "flux" / "train.yaml"
    assert f"path: {tmp_path}/run\n" in config.read_text()


def test_runs_are_in_runs_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("cpu/tiny")
    assert (tmp_path / "runs" / "cpu" / "tiny" / "round-1" / "flux" / "train.yaml").is_file()


def test_run_is_never_overwritten(tmp_path):
    folder = tmp_path / "run"
    run("cpu/tiny", "--run-dir", folder)
    before = (folder / "job.sbatch").read_text()
    refused = run("cpu/tiny", "--run-dir", folder, "--arm", "flux", code=2)
    assert f"{folder} exists and is not empty: --resume continues it" in refused
    assert (folder / "job.sbatch").read_text() == before
    (tmp_path / "file").touch()
    assert "is not empty" in run("cpu/tiny", "--run-dir", tmp_path / "file", code=2)


def test_resumed_run_has_the_same_values_but_more_steps(tmp_path):
    folder = tmp_path / "run"
    assert "has no experiment.json" in run("cpu/tiny", "--run-dir", folder, "--resume", code=2)
    run("cpu/tiny", "--run-dir", folder)
    assert "mode=start " in (folder / "job.sbatch").read_text()
    other = run("cpu/tiny", "--run-dir", folder, "--resume", "--set", "training.lr=2", code=2)
    assert "flux.training.lr: 0.001 -> 2.0" in other
    run("cpu/tiny", "--run-dir", folder, "--resume", "--set", "training.steps=40", "--arm", "flux")
    job = (folder / "job.sbatch").read_text()
    assert "mode=resume " in job
    assert "arms=(round-1/flux round-2/flux) " in job
    for one in ("round-1", "round-2"):
        kept = run_folder.read(folder / one).arms
        assert {arm: workload.training.steps for arm, workload in kept.items()} == {
            "megatron": 40,
            "flux": 40,
        }


# the options that begin a run, and the rounds that it has
BEGUN = {
    "several arms": ((), 2),
    "one arm": (("--arm", "flux"), 0),
    "one arm in turn with itself": (("--arm", "flux", "--alternate", "3"), 3),
    "no rounds": (("--alternate", "0"), 0),
    "one round": (("--alternate", "1"), 1),
}


@pytest.mark.parametrize("case", BEGUN)
def test_several_arms_alternate_and_a_resumed_run_keeps_its_rounds(case, tmp_path):
    options, rounds = BEGUN[case]
    folder = tmp_path / "run"
    names = [f"round-{number}" for number in range(1, rounds + 1)]
    arms = ["flux"] if "--arm" in options else ["megatron", "flux"]
    trained = " ".join(str(Path(one, arm)) for one in names or [""] for arm in arms)
    resume = ("--resume",)
    for given in (options, resume, (*resume, "--alternate", rounds)):
        run("cpu/tiny", "--run-dir", folder, *given)
        assert f"arms=({trained}) " in (folder / "job.sbatch").read_text()
        assert sorted(one.name for one in folder.glob("round-*")) == names
    for other in {0, rounds + 1} - {rounds}:
        refused = run("cpu/tiny", "--run-dir", folder, *resume, "--alternate", other, code=2)
        assert f"--alternate {other} given, {folder} has {rounds or 'no'} rounds" in refused


REFUSED = {
    "an unknown arm": (("cpu/tiny", "--arm", "te"), "arms ['te'] given, some of ['megatron'"),
    "an unknown experiment": (("cpu/tyni",), "cpu/tiny"),
    "a wrong value": (("cpu/tiny", "--set", "parallel.tp=3"), "parallel"),
    "no value": (("cpu/tiny", "--set", "parallel.tp"), "key=value expected"),
    "no checkout": ((GPT,), "--megatron-lm: none given, a checkout of core_v0.16.1 needed"),
    "another folder": ((GPT, "--megatron-lm", "/usr"), "/usr has no pretrain_gpt.py"),
    "a variable without a value": (("cpu/tiny", "--env", "A"), "--env ['A'] given, KEY=VALUE"),
    "an option without a name": (("cpu/tiny", "--sbatch", "=1"), "--sbatch '=1' given"),
    "two things at once": (("cpu/tiny", "--submit", "--local"), "one of --dry-run, --submit"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_launched_is_refused_before_anything_is_written(case, tmp_path, monkeypatch):
    monkeypatch.delenv("FLUX_MEGATRON_LM", raising=False)
    arguments, message = REFUSED[case]
    refused = run(*arguments, "--run-dir", tmp_path / "run", code=2)
    assert message in " ".join(refused.replace("│", " ").split())
    assert not (tmp_path / "run").exists()


def test_another_release_than_the_experiment_names_is_reported(tmp_path, checkout):
    info = checkout / "megatron" / "core" / "package_info.py"
    given = ("--megatron-lm", checkout, "--run-dir")
    assert "was written for" not in run(GPT, *given, tmp_path / "same")
    info.write_text(info.read_text().replace("16", "19"))
    output = run(GPT, *given, tmp_path / "other")
    assert f"{checkout} is 0.19.1, the experiment was written for core_v0.16.1" in output


def test_submit_tells_the_job(tmp_path, monkeypatch):
    program = tmp_path / "bin" / "sbatch"
    program.parent.mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setattr(sbatch.shutil, "which", lambda name: program if program.exists() else None)
    folder = tmp_path / "a run"
    assert "no sbatch on PATH" in run("cpu/tiny", "--run-dir", folder, "--submit", code=2)
    assert not folder.exists()
    program.write_text('#!/bin/sh\n[ -f "$2" ] && echo "17;cluster $1" | cut -d" " -f1\n')
    program.chmod(0o755)
    assert run("cpu/tiny", "--run-dir", folder, "--submit") == "17\n"
    program.write_text("#!/bin/sh\necho invalid partition >&2; exit 1\n")
    refused = run("cpu/tiny", "--run-dir", tmp_path / "other", "--submit", code=2)
    assert "invalid partition" in refused


def test_local_run_needs_the_gpus(tmp_path, checkout, monkeypatch):
    monkeypatch.setattr(local, "_gpus", lambda: 4)
    output = run(GPT, "--local", "--megatron-lm", checkout, "--run-dir", tmp_path / "run", code=2)
    assert "128 GPUs needed on this machine, 4 found: an experiment of 16 nodes" in output
    assert not (tmp_path / "run").exists()
    arms = experiment.load("node/gpt3-175b-4-layers_h200").arms
    local.check_gpus(arms["flux"])
    monkeypatch.setattr(local, "_gpus", lambda: 2)
    with pytest.raises(LaunchError, match=r"4 GPUs needed on this machine, 2 found$"):
        local.check_gpus(arms["flux"])


def test_local_run_stops_at_the_first_failure(tmp_path, monkeypatch):
    """Its Python runs no training: the doctor passes, and the second arm fails in each round."""
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")  # salloc's
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        f'echo "$*" >>{tmp_path}/calls\n'
        'case "$*" in *doctor*) exit 0 ;; *"/flux/train.yaml"*) exit 5 ;; esac\n'
    )
    python.chmod(0o755)
    (tmp_path / "site.yaml").write_text(f"python: {python}\n")
    given = ("cpu/tiny", "--local", "--run-dir", tmp_path / "run", "--site", tmp_path / "site.yaml")
    assert "arm round-1/flux: start ended with code 5" in run(*given, code=5)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert ["doctor" in call for call in calls] == [True, False, True, False]
    assert "--nnodes=1 --nproc-per-node=4" in calls[1]
    assert not calls[1].endswith("--resume")
    run(*given, "--resume", "--arm", "megatron")
    calls = (tmp_path / "calls").read_text().splitlines()
    assert ["doctor" in call for call in calls[4:]] == [True, False, True, False]
    assert calls[5].endswith("/run/round-1/megatron/train --resume")
    assert calls[7].endswith("/run/round-2/megatron/train --resume")


def test_local_run_ends_by_ctrl_c():
    """Its ranks get it too, and torchrun ends with 1."""
    program = """
import os, signal, subprocess, sys, threading, time
from flux_megatron.launch import local
job = [sys.executable, "-c", "import signal, sys, time; "
       "signal.signal(signal.SIGINT, lambda *_: sys.exit(1)); print(1, flush=True); time.sleep(60)"]
process = subprocess.Popen(job, stdout=subprocess.PIPE)
def interrupt():
    process.stdout.readline()
    os.killpg(0, signal.SIGINT)
threading.Thread(target=interrupt).start()
assert local._wait(process) == 130
assert local._wait(subprocess.Popen([sys.executable, "-c", "exit(3)"])) == 3
"""
    done = subprocess.run(
        [sys.executable, "-c", program], start_new_session=True, capture_output=True, text=True,
        timeout=120, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_local_run_trains(tmp_path):
    """The real doctor, torchrun and ranks: without Slurm those of two nodes are on one."""
    pytest.importorskip("megatron.core", reason="trains with it")
    text = tmp_path / "text"
    text.mkdir()
    (text / "words.txt").write_text(" ".join(f"{i} is {i * i}." for i in range(3000)))
    folder = tmp_path / "a run"
    run("cpu/tiny", "--local", "--arm", "megatron", "--data-path", text, "--run-dir", folder,
        "--set", "model.layers=1", "--set", "training.steps=3")  # fmt: skip
    train = folder / "megatron" / "train"
    rows = [json.loads(line) for line in (train / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    logs = (folder / "megatron" / "logs").glob("node-0/local-0_*/attempt_0/*/stdout.log")
    assert sorted(log.parent.name for log in logs) == ["0", "1", "2", "3"]


def test_entry_points_submit_one_after_the_other(tmp_path, checkout):
    """A pretended sbatch numbers the jobs, and remembers what each has to wait for."""
    scripts = Path(__file__).parents[2] / "scripts" / "slurm"
    program = tmp_path / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\n"
        'echo "$2 $(grep -o "dependency=.*" "$2")" >>"$JOBS"; wc -l <"$JOBS"\n'
    )  # fmt: skip
    program.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{program.parent}:{os.environ['PATH']}", "JOBS": str(tmp_path / "jobs"),
        "PYTHON": sys.executable, "PYTHONPATH": str(scripts.parents[1]),
        "FLUX_MEGATRON_LM": str(checkout),
    }  # fmt: skip

    def call(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )

    done = call(str(scripts / "paper.sh"), "h800-nvlink", "--site", str(scripts / "site.yaml"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "paper/gpt3-175b_h800-nvlink: job 1",
        "paper/llama2-70b_h800-nvlink: job 2",
    ]
    done = call(str(scripts / "one.sh"), "cpu/tiny", "--arm", "flux")
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr
    jobs = [line.split(" ") for line in (tmp_path / "jobs").read_text().splitlines()]
    assert [waits for _, waits in jobs] == ["", "dependency=afterany:1", ""]
    assert [str(Path(file).relative_to(tmp_path)) for file, _ in jobs] == [
        "runs/paper/gpt3-175b_h800-nvlink/job.sbatch",
        "runs/paper/llama2-70b_h800-nvlink/job.sbatch",
        "runs/cpu/tiny/job.sbatch",
    ]
    assert call(str(scripts / "paper.sh"), "a100").returncode == 2
    assert call(str(scripts / "one.sh")).returncode == 2
