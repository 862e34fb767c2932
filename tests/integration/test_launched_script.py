"""A training script under our launcher: what starts, what is refused, and that it trains."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from started import python, ran
from typer.testing import CliRunner

from flux_megatron.cli import app
from flux_megatron.errors import BadInput
from flux_megatron.integration import bootstrap
from flux_megatron.launch import __main__ as launcher

CHECKOUT = os.environ.get("FLUX_MEGATRON_LM")
REPOSITORY = Path(__file__).parents[2]
PARSER = """
import argparse
def add_megatron_arguments(parser):
    parser.add_argument("--transformer-impl", default="transformer_engine")
    parser.add_argument("--fp8-format", dest="fp8")
    parser.add_argument("--brand-new", type=int, default=7)
    parser.add_argument("--tensor-model-parallel-size", type=int, default=2)
    return parser
def parse_args():
    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args()
"""
SCRIPT = """
import sys
from megatron.core.models.gpt import gpt_layer_specs
from megatron.training import arguments
before = gpt_layer_specs.LocalSpecProvider
args = arguments.parse_args()
print(__name__, sys.argv[1], args.transformer_impl, gpt_layer_specs.LocalSpecProvider is before)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    """What stands for a checkout: a training script with its own megatron.training beside it."""
    folder = tmp_path_factory.mktemp("Megatron-LM")
    (folder / "megatron" / "training").mkdir(parents=True)
    (folder / "megatron" / "training" / "__init__.py").touch()
    (folder / "megatron" / "training" / "arguments.py").write_text(PARSER)
    (folder / "pretrain.py").write_text(SCRIPT)
    return folder / "pretrain.py"


# nothing is computed there
ENVIRONMENT = {
    **os.environ, "TORCHDYNAMO_DISABLE": "1", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "tests" / "processes"))),
}  # fmt: skip


def test_launcher_runs_the_script_with_the_flag(script):
    allowed = ["--brand-new", "3", "--flux-allow", "brand-new"]  # which nobody looked at
    done = python(
        "-m", "flux_megatron.launch", script, "--flux-overlap", "--tensor-model-parallel-size", 1,
        *allowed, folder=script.parent.parent, **ENVIRONMENT,
    )  # fmt: skip
    goes_on, alone, first, ran, last = done.stdout.splitlines()
    assert goes_on == "flux_megatron: --flux-allow goes on with --brand-new"
    nothing = "tensor parallel size is 1, so no call has communication to overlap"
    assert alone == f"flux_megatron: --flux-overlap: {nothing}"
    assert first.startswith("flux_megatron: --transformer-impl local, not transformer_engine")
    assert first.endswith("and norms are ours, attention is torch's")
    assert ran == "__main__ --flux-overlap local False"
    assert last == "flux_megatron: no call came to our layers, so nothing was overlapped"


def test_launcher_says_what_is_missing(script, capsys):
    with pytest.raises(SystemExit) as end:
        launcher.main([str(script.with_name("nowhere.py"))])
    assert end.value.code == 2
    assert "nowhere.py: no such file" in capsys.readouterr().err


def test_command_passes_everything_after_the_script_on(monkeypatch):
    seen = []
    monkeypatch.setattr("flux_megatron.launch.__main__.main", seen.append)
    arguments = ["pretrain_gpt.py", "--bf16", "--help", "--device", "x", "--split", "99,1,0"]
    monkeypatch.setenv("RANK", "0")
    assert CliRunner().invoke(app, ["run", "--device", "cpu", *arguments]).exit_code == 0
    assert seen == [["--device", "cpu", *arguments]]


OTHERS = {
    "fails.py": "import os; os.environ['RANK'] == '1' and exit(3); import time; time.sleep(60)",
    "waits.py": "import time; print('ready', flush=True); time.sleep(60)",
}


def started(script: Path, *arguments: str) -> subprocess.Popen:
    """`flux-megatron run` as in a terminal: Ctrl-C goes to its ranks too."""
    command = [sys.executable, "-m", "flux_megatron", "run", "--device", "cpu"]
    return subprocess.Popen(
        [*command, str(script), *arguments], env=ENVIRONMENT, cwd=script.parent.parent,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def other(script: Path, name: str) -> Path:
    file = script.with_name(name)
    file.write_text(OTHERS[name])
    return file


def test_command_ends_with_what_ranks_refuse(script):
    """Once for all of them, without the traceback of torchrun."""
    job = started(script, "--flux-overlap", "--fp8-format", "hybrid")
    _, stderr = job.communicate(timeout=120)
    first, second, third = stderr.splitlines()
    assert job.returncode == 2, stderr
    assert first == f"starting torchrun with 2 ranks of {script}"
    assert second == f"{script}: --flux-overlap cannot go with:"
    assert third.startswith("  --fp8-format: ")


def test_command_names_the_rank_that_failed(script):
    job = started(other(script, "fails.py"))
    _, stderr = job.communicate(timeout=120)
    assert job.returncode == 1, stderr
    assert stderr.splitlines()[1:] == ["rank 1 ended with code 3: see above"]


def test_command_ends_by_ctrl_c(script):
    job = started(other(script, "waits.py"))
    assert [job.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    os.killpg(job.pid, signal.SIGINT)
    _, stderr = job.communicate(timeout=120)
    assert job.returncode == 130, stderr
    assert len(stderr.splitlines()) == 1, stderr


def test_checkpoints_without_their_package_are_refused(script, monkeypatch):
    """Megatron would wait for its writers, which have died of it."""
    monkeypatch.setattr(bootstrap, "is_there", lambda module: module != "psutil")
    bootstrap.check(str(script), ["--saved", "x"])
    for words in (["--save", "x"], ["--save=x"]):
        with pytest.raises(BadInput, match="--save: Megatron's checkpoints need psutil"):
            bootstrap.check(str(script), words)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not CHECKOUT, reason="FLUX_MEGATRON_LM names no checkout of Megatron-LM")
@pytest.mark.parametrize(
    ("flux", "more"),
    [
        ("--flux-overlap --flux-strict", []),
        ("--spec flux_megatron.specs flux_layer_spec", []),
        ("--flux-overlap --flux-strict --flux-compare 2", ["--train-iters", "22"]),
    ],
    ids=["flag", "spec", "compare"],
)
def test_unmodified_pretrain_gpt_trains_as_with_stock_layers(flux, more):
    """The script compares the losses, of both arms if there are two, with a run of stock layers."""
    variables = {"PYTHON": sys.executable, "MODELS": "llama", "RANKS": "2", "FLUX": flux}
    done = ran(REPOSITORY / "scripts" / "pretrain.sh", *more, limit_s=880, **variables)
    if more:
        pattern = r"^ flux: [\d.]+x \(95 %: [\d.]+ to [\d.]+\).*, 5 iterations of each arm$"
        for line in (r"^ 22 \d", pattern):
            assert re.search(line, done.stdout, re.MULTILINE), done.stdout
