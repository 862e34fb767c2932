"""`flux-megatron launch`: what it prints, writes and refuses, on machines without torch too."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from started import executable, ran

pytest.importorskip("jinja2", reason="needs the extra `launch`")

from launched import GPT, arms, checkout, directives, given, launch, settings, variables
from without_torch import without_torch

from flux_megatron.launch import experiment, run_folder, slurm_options

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", [GPT, "cpu/tiny"])
def test_dry_run_needs_no_torch_and_writes_nothing(name, tmp_path):
    more = ("numpy", "matplotlib")
    done = without_torch("launch", name, "--dry-run", more=more, folder=tmp_path)
    shown = [line for line in done.stdout.splitlines() if line.startswith("## arm ")]
    known = experiment.load(name).arms
    assert shown == [f"## arm round-{one}/{arm}" for one in (1, 2) for arm in known]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", experiment.names())
def test_scripts_are_bash(name, tmp_path):
    launch(name, "--run-dir", tmp_path / "a run", "--megatron-lm", checkout(tmp_path / "it's"))
    scripts = [*(tmp_path / "a run").rglob("*.sh"), tmp_path / "a run" / "job.sbatch"]
    assert len(scripts) > 4
    check = ["bash", "-n"]
    if shutil.which("shellcheck"):
        check = ["shellcheck", "--severity=warning", "--shell=bash"]
    for script in scripts:
        ran(*check, script)


def test_run_folder_holds_the_experiment_as_it_was_resolved(tmp_path):
    folder, values = tmp_path / "a run", ("--set", "training.micro_batch=1")
    options = ("--run-dir", folder, "--megatron-lm", checkout(tmp_path), *values)
    assert str(folder / "job.sbatch") in launch(GPT, *options, "--arm", "flux", "--arm", "te")
    whole = experiment.load(GPT, {"training.micro_batch": 1})
    for one in (folder / "round-1", folder / "round-2"):
        kept = run_folder.read(one)
        assert kept.arms == {arm: whole.arms[arm] for arm in ("te", "flux")}
        assert (kept.name, kept.program, kept.stated) == (whole.name, whole.program, whole.stated)
        assert kept.assumed["training.micro_batch"] == "set by the caller"
        assert {file.name for file in one.iterdir()} == {"experiment.json", "flux", "te"}
    assert {file.name for file in folder.iterdir()} == {
        "job.sbatch",
        "job.py",
        "round-1",
        "round-2",
    }


def test_data_and_runs_are_found_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.idx").touch()
    for script in arms(GPT, "--data-path", "0.3", "--data-path", "text").values():
        assert given(script)["--data-path"] == ["0.3", str(tmp_path / "text")]
    launch("cpu/tiny", "--data-path", ".")
    config = tmp_path / "runs" / "cpu" / "tiny" / "round-2" / "flux" / "train.yaml"
    assert f"path: {tmp_path}\n" in config.read_text()


def test_run_is_never_overwritten(tmp_path):
    folder = tmp_path / "run"
    launch("cpu/tiny", "--run-dir", folder)
    before = (folder / "job.sbatch").read_text()
    refused = launch("cpu/tiny", "--run-dir", folder, "--arm", "flux", code=2)
    assert f"{folder} exists and is not empty: --resume continues it" in refused
    assert (folder / "job.sbatch").read_text() == before
    (tmp_path / "file").touch()
    assert "file: file exists; a" in launch("cpu/tiny", "--run-dir", tmp_path / "file", code=2)


def test_resumed_run_has_the_same_values_but_more_steps(tmp_path):
    resume = ("cpu/tiny", "--run-dir", tmp_path / "run", "--resume", "--set")
    assert "has no experiment.json" in launch(*resume, "training.steps=20", code=2)
    launch(*resume[:-2])
    file = tmp_path / "run" / "job.sbatch"
    assert settings(file.read_text()).mode == "start"
    assert "flux.training.lr: 0.001 -> 2.0" in launch(*resume, "training.lr=2", code=2)
    launch(*resume, "training.steps=40", "--arm", "flux")
    job = settings(file.read_text())
    assert (job.mode, job.arms) == ("resume", ["round-1/flux", "round-2/flux"])
    for one in run_folder.of_run(tmp_path / "run"):
        kept = run_folder.read(one).arms
        assert {arm: w.training.steps for arm, w in kept.items()} == {"megatron": 40, "flux": 40}


def test_resumed_run_goes_on_with_what_it_was_given(tmp_path, monkeypatch):
    """Else it would train on other data, or anew without its checkpoints."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.idx").touch()
    (tmp_path / "site.yaml").write_text("python: /opt/python\n")
    begun = ("--data-path", "text", "--site", "site.yaml", "--megatron-lm", checkout(Path("it's")))
    launch(GPT, "--run-dir", "run", *begun, "--save-interval", 5, "--env", "A=b c", "--env", "B=")
    resume = (GPT, "--run-dir", tmp_path / "run", "--resume")
    script = tmp_path / "run" / "round-2" / "flux" / "command.sh"
    before = script.read_text()
    assert "--load" in before
    monkeypatch.chdir("/")
    launch(*resume)
    assert script.read_text() == before
    for value in ("c", "d", "c"):
        launch(*resume, "--env", f"A={value}")
        launch(*resume)
        assert script.read_text() == before.replace("'A=b c'", f"A={value}")
    refused = launch(*resume, "--set", 'arguments=[--clip-grad,"0.1"]', code=2)
    assert "cannot be resumed with other values: extra_arguments." in refused
    refused = launch(*resume, "--set", "megatron_lm=core_v0.19.0", code=2)
    assert "megatron_lm: core_v0.16.1 -> core_v0.19.0" in refused
    refused = launch(*resume, "--data-path", tmp_path, code=2)
    said = f"cannot be resumed with other data: --data-path {tmp_path}/text -> {tmp_path}"
    assert said in refused


# the options that begin a run, and the rounds that it has
BEGUN = [
    ((), 2),
    (("--arm", "flux"), 0),
    (("--arm", "flux", "--alternate", "3"), 3),
    (("--alternate", "0"), 0),
    (("--alternate", "1"), 1),
]


@pytest.mark.parametrize(("options", "rounds"), BEGUN)
def test_several_arms_alternate_and_a_resumed_run_keeps_its_rounds(options, rounds, tmp_path):
    folder = tmp_path / "run"
    names = [f"round-{number}" for number in range(1, rounds + 1)]
    known = ["flux"] if "--arm" in options else ["megatron", "flux"]
    trained = [str(Path(one, arm)) for one in names or [""] for arm in known]
    for more in (options, ("--resume",), ("--resume", "--alternate", rounds)):
        launch("cpu/tiny", "--run-dir", folder, *more)
        assert settings((folder / "job.sbatch").read_text()).arms == trained
        assert sorted(one.name for one in folder.glob("round-*")) == names
    for other in {0, rounds + 1} - {rounds}:
        options = ("--run-dir", folder, "--resume", "--alternate", other)
        refused = launch("cpu/tiny", *options, code=2)
        assert f"--alternate {other} given, {folder} has {rounds or 'no'} rounds" in refused


SITES = {
    "pyhton: x": "pyhton: Extra inputs",
    "sbatch: [a]": "sbatch: Input should be a valid dict",
    "- a": "a mapping expected, list given",
    "silent_s: 0": "silent_s: Input should be greater than or equal to 1, 0 given",
    "container: {image: a, imge: b}": "container.imge: Extra inputs",
    "container: {image: images/a.sqsh}": "'images/a.sqsh' given, an image such as nvcr.io#",
    "container: {image: a b}": "container.image: 'a b' given, an image such as nvcr.io#",
    "container: {image: a, mounts: [data:/d]}": "/HOST[:/CONTAINER[:FLAG+FLAG]], such as",
    "container: {image: a, mounts: ['/a,/b']}": "/HOST[:/CONTAINER[:FLAG+FLAG]], such as",
    "container: {image: a, images: {fluks: b}}": "container.images.fluks",
    "container: {images: {flux: b}}": "none in container.images for ['megatron']",
    "sbatch: {exclusive: 0}": "sbatch.exclusive: 0 given, true, user, mcs or topo expected",
    "sbatch: {mem: true}": "sbatch.mem: true given, 0 for all of a node's, or a number",
    "sbatch: {signal: USR2@1}": "sbatch.signal: 'USR2@1' given, B:USR1@SECONDS with 30 or more",
    "sbatch: {signal: 'B:USR1@1'}": "sbatch.signal: 'B:USR1@1' given",
    "sbatch: {time: yesterday}": "sbatch.time: 'yesterday' given, MINUTES, HOURS:MINUTES:SECONDS",
    "sbatch: {time: true, mem: x}": "sbatch.time: true given, MINUTES, HOURS:MINUTES:SECONDS, DAYS",
    "sbatch: {a b: 1}": "sbatch.a b: 'a b' given, the long name of an option",
    'sbatch: {comment: "a\\nrm b"}': "sbatch.comment: 'a\\nrm b' given, a text of one line",
    "sbatch: {nice: 1.5}": "sbatch.nice: 1.5 given, a text of one line, a whole number, true",
    "sbatch: {hold: null}": "hold: null given, true, for an option without a value, expected; null",
    "srun: {quiet: null}": "srun.quiet: null given, a text of one line, a whole number, true where",
    "environment: {1X: a}": "environment.1X: String should match pattern '^[A-Za-z_][A-Za-z0-9",
    "environment: {X: 1}": "environment.X: Input should be a valid string, 1 given",
    "preflight: 1": "preflight: Input should be a valid boolean, 1 given",
    "python: /a=b/python": "python: '/a=b/python' given, a program without = in its name expected",
}


@pytest.mark.parametrize("text", SITES)
def test_wrong_site_is_refused(text, tmp_path):
    file = tmp_path / "site.yaml"
    file.write_text(text)
    refused = launch("cpu/tiny", "--dry-run", "--site", file, code=2)
    assert SITES[text] in refused
    assert refused.startswith(f"{file}: ") is not text.startswith("container: {images")


# what a launch is given beside a site
WRONG = {
    "--sbatch comment=": "--sbatch comment: '' given, a text of one line",
    "--sbatch nodes=null": "--sbatch nodes=null given, nodes=2 expected",
    "--env X;touch=3": "--env X;touch: String should match pattern '^[A-Za-z_][A-Za-z0-9_]*$'",
    "--set cluster.environment={'a;b':c}": "cluster.environment.a;b: String should match pattern",
    "--run-dir a\nb": "a\\nb/slurm-%j.out' given to sbatch, a text of one line expected",
    "--sbatch time=5": "--sbatch time=5 given, more than the 300 s expected in which signal=B:USR1",
    "--sbatch time=0:05:00": "--sbatch time=0:05:00 given, more than the 300 s",
    "--sbatch time=4:59": "--sbatch time=4:59 given, more than the 300 s",
    "--sbatch signal=B:USR1@14400": "--sbatch time=04:00:00 given, more than the 14400 s",
    "--alternate 1000000": "--alternate 1000000 given, at most 100 expected: each trains every arm",
}


@pytest.mark.parametrize("options", WRONG)
def test_wrong_options_are_refused(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused = launch("cpu/tiny", "--dry-run", *options.split(" ", 1), code=2)
    assert WRONG[options] in refused
    assert not [*tmp_path.iterdir()]


def test_program_train_reads_one_folder_of_text():
    two = ("--data-path", "/", "--data-path", "/tmp")
    refused = launch("cpu/tiny", "--dry-run", *two, code=2)
    assert "--data-path / --data-path /tmp given, one folder of text files expected" in refused


def test_a_printed_launch_says_that_the_checkout_is_not_given(tmp_path):
    said = "# path/to/Megatron-LM stands for what --megatron-lm names: none given\n"
    assert said in launch(GPT, "--dry-run")
    assert said not in launch(GPT, "--dry-run", "--megatron-lm", checkout(tmp_path))
    assert said not in launch("cpu/tiny", "--dry-run")


def test_another_release_than_the_experiment_names_is_reported(tmp_path):
    for version, reported in (("0.16.1", False), ("0.19.1", True)):
        there = checkout(tmp_path / version, version)
        output = launch(GPT, "--megatron-lm", there, "--run-dir", tmp_path / f"run {version}")
        text = f"{there} is {version}, the experiment was written for core_v0.16.1"
        assert (text in output) is reported


# --- what the scripts ask for


def test_one_job_trains_all_arms(tmp_path):
    job = launch(GPT, "--dry-run", "--run-dir", tmp_path).split("## job.sbatch")[1]
    trained = [f"round-{one}/{arm}" for one in (1, 2) for arm in ("megatron", "te", "flux")]
    assert settings(job).arms == trained
    expected = {
        "time": "04:00:00", "nodes": "16", "gpus-per-node": "8", "ntasks-per-node": "1",
        "exclusive": None, "requeue": None, "mem": "0", "open-mode": "append",
        "signal": "B:USR1@300", "output": f"{tmp_path}/slurm-%j.out",
        "job-name": "paper-gpt3-175b_a100-pcie",
    }  # fmt: skip
    assert directives(job) == expected
    one = directives(launch(GPT, "--dry-run", "--arm", "flux"))
    assert "signal" not in one  # nothing could be saved before the time limit
    assert "signal" in directives(launch(GPT, "--dry-run", "--arm", "flux", "--save-interval", 9))
    on_cpu = directives(launch("cpu/tiny", "--dry-run"))
    assert not on_cpu.keys() & {"gpus-per-node", "exclusive", "mem"}


def test_site_options_stand_instead_of_ours(tmp_path):
    (tmp_path / "site.yaml").write_text(
        "python: /env/bin/python\n"
        "setup: [module load cuda]\n"
        "environment: {NCCL_SOCKET_IFNAME: ib0, OMP_NUM_THREADS: '7'}\n"
        "sbatch: {partition: a100, exclusive: user, nodes: 16, gres: 'gpu:8', time: 12:00:00,\n"
        "         account: you, qos: low, signal: 'b:usr1@600'}\n"
    )
    options = ("account=me", "partition=b", "comment=hello there", "reservation", "qos=null")
    given = ["--site", tmp_path / "site.yaml", "--env", "A=b c", "--env", "NCCL_DEBUG=TRACE"]
    given += ["--set", "cluster.environment.NCCL_DEBUG=INFO", "--arm", "te"]
    given += [text for option in options for text in ("--sbatch", option)]
    output = launch(GPT, "--dry-run", *given)
    found = directives(output)
    expected = {"partition": "b", "account": "me", "nodes": "16", "gres": "gpu:8",
                "time": "12:00:00", "comment": '"hello there"', "reservation": None,
                "exclusive": "user", "signal": "b:usr1@600"}  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert not found.keys() & {"gpus-per-node", "qos"}
    for line in ("    'module load cuda'", "    /env/bin/python"):
        assert f"\n{line}\n" in output
    expected = {"NCCL_SOCKET_IFNAME": "ib0", "OMP_NUM_THREADS": "7", "NCCL_DEBUG": "TRACE",
                "A": "b c", "PYTHONUNBUFFERED": "1"}  # fmt: skip
    found = variables(output)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("value", ["null", "false"])
def test_a_site_takes_away_what_a_launch_asks_for(value, tmp_path):
    """All but what its ranks are started by."""
    every = directives(launch(GPT, "--dry-run")).keys()
    assert every == {*slurm_options.OURS}
    away = [name for name in every if name not in ("nodes", "ntasks-per-node")]
    (tmp_path / "site.yaml").write_text(f"sbatch: {{{', '.join(f'{n}: {value}' for n in away)}}}")
    left = directives(launch(GPT, "--dry-run", "--site", tmp_path / "site.yaml"))
    assert left == {"nodes": "16", "ntasks-per-node": "1"}
    given = [text for name in away for text in ("--sbatch", f"{name}={value}")]
    assert directives(launch(GPT, "--dry-run", *given)) == left


TIMES = [
    "6", "5:01", "30", "30:00", "04:00:00", "4:00:00", "0-1", "2-4", "2-04:30", "2-04:30:10",
    "UNLIMITED", "0",
]  # fmt: skip


@pytest.mark.parametrize("time", TIMES)
def test_a_time_limit_is_what_the_site_has_written(time, tmp_path):
    """YAML reads 4:00:00 as 14400, which Slurm takes for ten days of minutes."""
    (tmp_path / "site.yaml").write_text(f"sbatch: {{time: {time}}}")
    assert directives(launch(GPT, "--dry-run", "--site", tmp_path / "site.yaml"))["time"] == time


def test_a_container_sees_what_the_ranks_need_and_arms_may_have_their_own(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.idx").touch()
    (tmp_path / "site.yaml").write_text(
        "srun: {network: x, quiet: true}\n"
        "container: {image: 'a#b:c', images: {te: /te.sqsh},\n"
        f"            mounts: ['/x:/y:ro+rprivate', '{tmp_path}/texts:/d']}}"
    )
    output = launch(GPT, "--dry-run", "--run-dir", tmp_path / "run", "--data-path",
                    tmp_path / "texts" / "a", "--site", tmp_path / "site.yaml")  # fmt: skip
    reach = settings(output).srun
    mounts = f"/x:/y:ro+rprivate,{tmp_path}/texts:/d,{tmp_path}/run:{tmp_path}/run"
    for arm, image in {"flux": "a#b:c", "te": "/te.sqsh"}.items():
        *options, name = reach[arm]
        given = [f"--container-image={image}", f"--container-mounts={mounts}"]
        assert options == ["--network=x", "--quiet", *given]
        assert re.fullmatch(r"--container-name=flux_megatron-\w+-\$SLURM_JOB_ID", name)
    assert "\n    python3\n)\n" in output
    assert reach["flux"][-1] == reach["megatron"][-1] != reach["te"][-1]
    (tmp_path / "site.yaml").write_text("python: /opt/python\ncontainer: {image: a}")
    output = launch(GPT, "--dry-run", "--site", tmp_path / "site.yaml")
    assert "\n    /opt/python\n)\n" in output
    for name in ("a run", "a,b", "a:b"):
        options = ("--dry-run", "--run-dir", tmp_path / name, "--site", tmp_path / "site.yaml")
        assert f"'{tmp_path}/{name}' given, a folder without" in launch(GPT, *options, code=2)


# --- submitted, and on this machine


def test_submit_tells_the_job(tmp_path, monkeypatch):
    program = tmp_path / "bin" / "sbatch"
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setattr(shutil, "which", lambda name: program if program.exists() else None)
    folder = tmp_path / "a run"
    assert "no sbatch on PATH" in launch("cpu/tiny", "--run-dir", folder, "--submit", code=2)
    assert not folder.exists()
    executable(program, '#!/bin/sh\n[ -f "$2" ] && echo "17;cluster $1" | cut -d" " -f1\n')
    assert launch("cpu/tiny", "--run-dir", folder, "--submit") == "17\n"
    program.write_text("#!/bin/sh\necho invalid partition >&2; exit 1\n")
    refused = launch("cpu/tiny", "--run-dir", tmp_path / "other", "--submit", code=2)
    assert "invalid partition" in refused


@pytest.fixture
def local(tmp_path):
    """Options of a local run whose Python, this text of bash, runs no training."""

    def options(python: str) -> tuple[object, ...]:
        program, site = tmp_path / "python", tmp_path / "site.yaml"
        executable(program, f'#!/bin/bash\ncase "$*" in *doctor*) exit 0 ;; esac\n{python}')
        site.write_text(f"python: {program}\n")
        return "cpu/tiny", "--local", "--run-dir", tmp_path / "a run", "--site", site

    return options


def test_local_run_stops_at_the_first_failure(tmp_path, monkeypatch, local):
    """The second arm fails in each round."""
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")  # salloc's
    fails = 'case "$*" in *"/flux/train.yaml"*) exit 5 ;; esac'
    options = local(f'echo "$*" ${{SLURM_JOB_NUM_NODES-}} >>{tmp_path}/calls\n{fails}\n')
    output = launch(*options, "--set", "training.steps= 9", code=5)
    assert "arm round-1/flux: start ended with code 5" in output
    first, second = (tmp_path / "calls").read_text().splitlines()
    assert "--nnodes=1 --nproc-per-node=4 " in first
    assert "--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 " in first
    assert second.endswith("/a run/round-1/flux/train")
    go_on = shlex.split(output.partition("go on with: flux-megatron launch ")[2])
    launch(*go_on, code=5)
    launch(*go_on, "--arm", "megatron")
    calls = (tmp_path / "calls").read_text().splitlines()[2:]
    # what is done is not done again, what was never started starts
    assert [call.partition("--out ")[2].removeprefix(str(tmp_path)) for call in calls] == [
        "/a run/round-1/flux/train --resume",
        "/a run/round-2/megatron/train",
    ]


@pytest.mark.parametrize("code", [1, 0])
def test_local_run_ends_by_ctrl_c(tmp_path, local, code):
    """Its ranks get it too, and torchrun ends with 1, or they with 0: Python handles what bash has
    it ignore. Later arms do not run.
    """
    python = (
        f"import os, signal, time; signal.signal(signal.SIGINT, lambda *_: os._exit({code})); "
        f"os.mkdir({str(tmp_path / 'ready')!r}); time.sleep(60)"
    )
    waits = f"exec {sys.executable} -c {shlex.quote(python)}\n"
    command = [sys.executable, "-m", "flux_megatron", "launch", *map(str, local(waits))]
    process = subprocess.Popen(
        command, start_new_session=True, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130, output
    assert "arm round-1/megatron: start ended with code 130" in output
    assert "go on with: flux-megatron launch cpu/tiny" in output
    assert "round-1/flux" not in output


def test_local_run_trains(tmp_path, monkeypatch):
    """The real doctor, torchrun and ranks."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # to import less
    pytest.importorskip("megatron.core", reason="trains with it")
    text = tmp_path / "text"
    text.mkdir()
    (text / "words.txt").write_text(" ".join(f"{i} is {i * i}." for i in range(3000)))
    small = ("cluster.nodes=1", "parallel.dp=1", "model.layers=1", "training.steps=3")
    sets = [word for value in small for word in ("--set", value)]
    launch("cpu/tiny", "--local", "--arm", "megatron", "--data-path", text, "--run-dir",
           tmp_path / "a run", *sets)  # fmt: skip
    arm = tmp_path / "a run" / "megatron"
    rows = [json.loads(line) for line in (arm / "train" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    logs = (arm / "logs").glob("node-0/local-0_*/attempt_0/*/stdout.log")
    assert sorted(log.parent.name for log in logs) == ["0", "1"]


def test_entry_points_submit_one_after_the_other(tmp_path):
    """A pretended sbatch numbers the jobs, and remembers what each has to wait for."""
    scripts = ROOT / "scripts" / "slurm"
    pretended = '#!/bin/sh\necho "$2 $(grep -o "dependency=.*" "$2")" >>"$JOBS"; wc -l <"$JOBS"\n'
    program = executable(tmp_path / "bin" / "sbatch", pretended)
    environment = {
        "PATH": f"{program.parent}:{os.environ['PATH']}", "JOBS": str(tmp_path / "jobs"),
        "PYTHON": sys.executable, "PYTHONPATH": str(ROOT),
        "FLUX_MEGATRON_LM": str(checkout(tmp_path)),
    }  # fmt: skip

    call = partial(ran, folder=tmp_path, code=None, **environment)
    done = call(str(scripts / "paper.sh"), "h800-nvlink", "--site", str(scripts / "site.yaml"))
    names = ("paper/gpt3-175b_h800-nvlink", "paper/llama2-70b_h800-nvlink")
    assert done.stdout.splitlines() == [f"{names[0]}: job 1", f"{names[1]}: job 2"], done.stderr
    done = call(str(scripts / "one.sh"), "cpu/tiny", "--arm", "flux")
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr
    jobs = [line.split(" ") for line in (tmp_path / "jobs").read_text().splitlines()]
    assert [waits for _, waits in jobs] == ["", "dependency=afterany:1", ""]
    assert [str(Path(file).relative_to(tmp_path)) for file, _ in jobs] == [
        f"runs/{name}/job.sbatch" for name in (*names, "cpu/tiny")
    ]
    assert call(str(scripts / "paper.sh"), "a100").returncode == 2
    assert call(str(scripts / "one.sh")).returncode == 2
