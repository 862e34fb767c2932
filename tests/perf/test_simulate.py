"""The command `simulate`, where there is neither torch nor triton."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flux_megatron.cli import app
from flux_megatron.perf.step import predict
from flux_megatron.simulate import predictions
from flux_megatron.simulate.predictions import Network

PCIE = "paper/gpt3-175b_a100-pcie"
BLOCKED = """
import sys
sys.modules["torch"] = sys.modules["triton"] = None  # importing them fails
from flux_megatron.cli import app
app()
"""


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCKED, "simulate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_it_runs_without_torch_and_draws(tmp_path: Path):
    file = tmp_path / "all.json"
    done = simulate(PCIE, "--out", str(tmp_path), "--json", str(file), "--sweep", "gpus=64..256")
    assert done.returncode == 0, done.stderr
    for words in ("tensor-parallel communication", "up to 1.24x", "training.micro_batch:",
                  "tp x pp x dp", "384 micro-batches", "arXiv 2406.06858"):  # fmt: skip
        assert words in done.stdout
    assert (tmp_path / "paper_gpt3-175b_a100-pcie.png").read_bytes()[1:4] == b"PNG"
    found = json.loads(file.read_text())
    assert [*found["arms"]] == ["megatron", "te", "flux"]
    ours = found["arms"]["flux"]
    assert sum(ours["parts"].values()) == pytest.approx(ours["step_us"])
    assert found["speedups"]["flux"] == pytest.approx(
        found["arms"]["megatron"]["step_us"] / ours["step_us"]
    )
    assert [point["gpus"] for point in found["gpus"]["flux"]] == [64, 128, 256]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["paper/gpt3-175b_a100-pci"], "did you mean paper/gpt3-175b_a100-pcie"),
        ([PCIE, "--arm", "fluks"], "has arms ['megatron', 'te', 'flux'], ['fluks'] given"),
        ([PCIE, "--sweep", "gpus=9..3"], "gpus=8..16384 or assumed expected"),
        ([PCIE, "--set", "training.micro_batch=7"], "training.global_batch"),
        ([PCIE, "--sweep", "gpus=12"], "12 GPUs do not fill nodes of 8"),
        (["cpu/tiny"], "gpu 'cpu' on memory given"),
    ],
)
def test_what_is_refused_says_why(arguments, words):
    done = CliRunner().invoke(app, ["simulate", *arguments])
    assert done.exit_code == 2
    assert words in done.output


def test_arms_and_values_can_be_chosen():
    done = CliRunner().invoke(
        app, ["simulate", PCIE, "--arm", "flux", "--set", "training.micro_batch=1"]
    )
    assert done.exit_code == 0
    assert "768 micro-batches" in done.output
    assert "speedup" not in done.output  # there is nothing to compare with


def test_other_values_of_what_is_assumed():
    found = predictions.predict(PCIE, {}, ["megatron", "flux"], Network(), [], alternatives=True)
    tried = [(a.key, a.value) for a in found.alternatives]
    assert ("training.recompute", "full") in tried
    assert ("training.recompute", "none") not in tried  # as it is
    for alternative in found.alternatives:
        assert bool(alternative.steps) != bool(alternative.refused)
    full = next(a for a in found.alternatives if a.value == "full")
    assert full.steps["flux"].step_us > found.steps["flux"].step_us
    low, high = found.range("flux")
    assert low <= found.speedups("flux") <= high
    assert low < high


def test_slow_links_between_nodes():
    arms = ["flux"]
    found = predictions.predict(PCIE, {}, arms, Network(1.0, 20_000.0), [], alternatives=False)
    before = predictions.predict(PCIE, {}, arms, Network(), [], alternatives=False)
    assert found.steps["flux"].exposed["pp"] > 50 * before.steps["flux"].exposed["pp"]
    assert found.workloads["flux"].cluster.nics is not None
    assert found.workloads["flux"].cluster.nics.latency_us == 20_000.0
    assert found.steps["flux"] == predict(found.workloads["flux"])
