"""The command `simulate`, where there is neither torch nor triton."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner
from without_torch import without_torch

from flux_megatron.cli import app
from flux_megatron.lab.perf import flops
from flux_megatron.lab.perf.step import Step
from flux_megatron.lab.simulate import commands, predictions, tables
from flux_megatron.launch.experiment import load

PCIE = "paper/gpt3-175b_a100-pcie"


def test_it_runs_without_torch(tmp_path: Path):
    file = tmp_path / "all.json"
    done = without_torch("simulate", PCIE, "--json", file, "--sweep")
    for words in ("tensor-parallel communication", "up to 1.24", "--assumptions lists them",
                  "384 micro-batches", "arXiv 2406.06858", "all of them"):  # fmt: skip
        assert words in done.stdout
    found = json.loads(file.read_text())
    assert [*found["arms"]] == ["megatron", "te", "flux"]
    ours = found["arms"]["flux"]
    assert sum(ours["parts"].values()) == pytest.approx(ours["step_us"])
    assert found["speedups"]["flux"] == pytest.approx(
        found["arms"]["megatron"]["step_us"] / ours["step_us"]
    )
    assert found["alternatives"]


@pytest.mark.parametrize("name", [PCIE, "study/dlrm-128-nodes"])
def test_what_is_printed_does_not_depend_on_the_order_of_hashes(name, monkeypatch):
    printed = set()
    for seed in "123":
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        printed.add(without_torch("simulate", name, "--assumptions", "--sweep").stdout)
    (text,) = printed
    assert "Assumed" in text


def test_json_to_stdout_is_all_that_is_printed():
    done = CliRunner().invoke(app, ["simulate", PCIE, "--json", "-"])
    assert [*json.loads(done.stdout)["arms"]] == ["megatron", "te", "flux"]


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen3-14B", "Qwen3-32B", "Llama-3 70B"])
@pytest.mark.parametrize(("tp", "tokens"), [(2, 2048), (4, 8192), (8, 16384)])
def test_the_page_has_what_is_predicted_for_a_width(name, tp, tokens):
    """The page's command, with the widths of each row."""
    page = (Path(__file__).parents[2] / "docs/reference/cost_model.md").read_text()
    command, _of_host = re.findall(r"^flux-megatron (simulate .*)$", page, re.MULTILINE)
    (row,) = [line for line in page.splitlines() if line.startswith(f"| {name}:")]
    cells = row.split("|")
    printed = cells[2 + (2, 4, 8).index(tp)].split(", ")
    words = command.replace("--tp 8", f"--tp {tp}").replace("16384", str(tokens)).split()
    for option, width in zip(
        ("--hidden", "--ffn", "--heads", "--kv-heads"), cells[1].split(":")[1].split(","),
        strict=True,
    ):  # fmt: skip
        words[words.index(option) + 1] = width.strip()
    found = json.loads(CliRunner().invoke(app, [*words, "--json", "-"]).stdout)
    at = (2048, 4096, 8192, 16384).index(tokens)
    assert float(printed[at]) == round(found["speedups"]["flux"], 2)


def test_arms_and_values_can_be_chosen():
    done = CliRunner().invoke(
        app, ["simulate", PCIE, "--arm", "flux", "--set", "training.micro_batch=1"]
    )
    assert done.exit_code == 0
    assert "768 micro-batches" in done.output
    assert "speedup" not in done.output  # there is nothing to compare with


def test_experts_are_refused():
    done = CliRunner().invoke(app, ["simulate", "node/mixtral-8x7b-2-layers_h200"])
    assert done.exit_code == 2
    assert "8 experts given: the cost model knows none" in done.output
    assert flops.mfu(load("node/mixtral-8x7b-2-layers_h200").arms["flux"], 1.0) is None


@cache
def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["simulate", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_without_a_file_the_options_say_what_to_predict(tmp_path):
    file = tmp_path / "all.json"
    text = run(
        "--gpu", "H100", "--tp", "8", "--hidden", "4096", "--layers", "4", "--json", str(file)
    )
    assert "8 x H100, tp 8 x pp 1 x dp 1" in text
    assert text.index("Error of the model here: unknown") < text.index("part of a step")
    own = predictions.predict(
        "study/one-node",
        commands.values(
            {"cluster.gpu": "H100", "parallel.tp": 8, "model.hidden": 4096, "model.layers": 4}
        ),
    )
    model = own.experiment.arms["flux"].model
    assert (model.heads, model.kv_heads, model.ffn, model.layers) == (32, 32, 16384, 4)
    found = json.loads(file.read_text())
    assert found["arms"]["flux"]["step_us"] == pytest.approx(own.steps["flux"].step_us)


def test_assumptions_are_listed_on_request_alone():
    reason = "as in GPT-2, whose architecture GPT-3 takes over"
    assert reason not in run(PCIE)
    assert reason in run(PCIE, "--assumptions").replace("\n", " ")


def test_a_papers_figure_stands_beside_its_own_run_alone():
    assert "up to 1.24" in run(PCIE)
    assert "1.24" not in run(PCIE, "--set", "model.layers=48")


def step(milliseconds: float, tokens_per_second: float, mfu: float, gib: int) -> Step:
    """Its optimizer takes 50 of them, qkv the others."""
    us = {"qkv": (milliseconds - 50) * 1e3, "optimizer": 5e4}
    return Step(milliseconds * 1e3, us, {}, tokens_per_second, mfu, gib * 2**30)


def rows(found: predictions.Predictions) -> list[list[str]]:
    return printed(tables.tables(found))


def printed(items: Iterable[object]) -> list[list[str]]:
    """The cells of all rows that are printed."""
    console = Console(width=120)
    with console.capture() as capture:
        for item in items:
            console.print(item)
    lines = [line for line in capture.get().splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]


def test_printed_figures_by_hand():
    found = predictions.predict(PCIE, {}, ["megatron", "flux"])
    arms = {"megatron": step(250, 32768, 0.4, 10), "flux": step(200, 40960, 0.5, 12)}
    slower = {"megatron": step(300, 1, 0.1, 6), "flux": step(250, 1, 0.1, 6)}
    other = predictions.Alternative({"training.recompute": "full"}, slower)
    shown = replace(found, steps=arms, alternatives=[other], is_published=False)
    assert rows(shown) == [
        ["qkv", "200.0", "80.0", "150.0", "75.0"],
        ["optimizer", "50.0", "20.0", "50.0", "25.0"],
        ["megatron", "250.0", "32,768", "40.0", "10.0", "1.000"],
        ["flux", "200.0", "40,960", "50.0", "12.0", "1.250"],
        ["training.recompute = full", "300.0", "1.200"],
        ["all of them", "", "1.200 to 1.250"],
    ]
    long = replace(shown, steps={"megatron": step(10_000, 1, 0.1, 6)}, alternatives=[])
    assert rows(long) == [
        ["qkv", "9.950", "99.5"],
        ["optimizer", "0.050", "0.5"],
        ["megatron", "10.000", "1", "10.0", "6.0"],
    ]


def test_other_values_of_what_is_assumed():
    found = predictions.predict(PCIE, {}, ["megatron", "flux"], alternatives=True)
    tried = [one for a in found.alternatives for one in a.values.items()]
    assert ("training.recompute", "full") in tried
    assert ("training.recompute", "none") not in tried  # as it is
    for alternative in found.alternatives:
        assert bool(alternative.steps) != bool(alternative.refused)
    full = next(a for a in found.alternatives if "full" in a.values.values())
    assert full.steps["flux"].step_us > found.steps["flux"].step_us
    low, high = found.range("flux")
    assert low <= found.speedups("flux") <= high
    assert low < high
