"""The errors that predictions carry are those of the committed rows and published runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("pydantic", reason="needs the extra `launch`")

import published_runs
from published_runs import RUNS, workload

from flux_megatron.lab.perf import accuracy, flops, step
from flux_megatron.lab.simulate.predictions import predict
from flux_megatron.launch.experiment import load, names

ROWS = Path(__file__).parents[2] / "docs/results/h200x2/iterations.jsonl"
ARMS = {"stock": "megatron", "tp_comm_overlap": "te", "flux": "flux"}  # of a row, of a step


def predicted_ms(row):
    """Of the three arms, for the step that `row` measured, with its number of layers."""
    batch = row["M"] // row["seq_length"]
    values = {
        "parallel.tp": row["tp"],
        "cluster.gpus_per_node": row["tp"],
        "training.micro_batch": batch,
        "training.global_batch": batch * (row.get("micro_batches") or 1),
        "model.seq_length": row["seq_length"],
        "model.layers": row["layers"],
        "training.flash_attention": row.get("transformer_impl") != "local",
    }
    family = row["model"].removesuffix(f"-{row['layers']}-layers")
    (name,) = (name for name in names() if name.startswith(f"node/{family}-"))
    steps = predict(name, values).steps
    return {arm: round(steps[one].step_us * 1e-3, 1) for arm, one in ARMS.items()}


def hundredths(value):
    return round(value * 100) / 100


def of_one_run(row):
    return row["model"], row["M"], row.get("micro_batches"), row["commit"]


def test_errors_on_h200_are_those_of_the_iterations():
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    rows = [row for row in rows if not row["arm"].endswith("_graphs")]
    cases = {}
    for row in rows:
        case = (row["model"], row["M"], row.get("micro_batches"), row["tp"], row["seq_length"])
        if case not in cases:
            cases[case] = predicted_ms(row)
        row["predicted_ms"] = cases[case][row["arm"]]
    steps = [row["predicted_ms"] / row["median_ms"] - 1 for row in rows]
    speedups = []
    stock = {of_one_run(row): row for row in rows if row["arm"] == "stock"}
    for row in rows:
        if row["arm"] == "flux":
            of = stock[of_one_run(row)]
            measured = of["median_ms"] / row["median_ms"]
            speedups.append(of["predicted_ms"] / row["predicted_ms"] / measured - 1)
    known = accuracy.KNOWN["H200", "nvlink"]
    assert known.of.startswith(f"{len(rows)} iterations")
    assert known.step == (hundredths(min(steps)), hundredths(max(steps)))
    assert known.speedup == (hundredths(min(speedups)), hundredths(max(speedups)))


def test_errors_on_a100_are_those_of_published_runs():
    times = [published_runs.seconds(run, full=f) for run in published_runs.RUNS for f in (0, 1)]
    errors = [predicted / published - 1 for published, predicted in times]
    known = accuracy.KNOWN["A100", "nvlink"]
    assert known.of.startswith("eight published runs")
    assert len(errors) == 8
    assert known.step == (hundredths(min(errors)), hundredths(max(errors)))


@pytest.mark.parametrize(
    ("name", "fp8", "words"),
    [
        ("node/gpt3-175b-4-layers_h200", "none", "steps -"),
        ("node/gpt3-175b-4-layers_h200", "delayed", "is measured or published for H200 in FP8"),
        ("paper/gpt3-175b_a100-nvlink", "none", "eight published runs"),
        ("paper/gpt3-175b_a100-pcie", "none", "unknown; no step is measured or published for A1"),
        ("paper/gpt3-175b_h800-nvlink", "none", "unknown; no step is measured or published for H"),
    ],
)
def test_every_prediction_says_its_error_or_that_none_is_known(name, fp8, words):
    workload = load(name, {"training.fp8": fp8}).arms["megatron"]
    assert words in accuracy.sentence(workload)


@pytest.mark.parametrize(
    ("run", "published"), [*zip(RUNS, (0.415, 0.514, 0.560, 0.563), strict=True)]
)
def test_seconds_and_mfu_of_megatrons_readme_are_of_the_same_runs(run, published):
    """It counts attention's scores whole, and the padded vocabulary."""
    one = workload(run, full=False)
    counted = flops.mfu(one, run.selective_s)
    scores = 6 * run.layers * 2048**2 * run.hidden * run.batch
    whole = counted * (1 + scores / flops.model_flops(one))
    assert whole == pytest.approx(published, abs=0.005)


@pytest.mark.parametrize("pp", [4, 12])
def test_hopper_is_predicted_near_megatrons_own_figure(pp):
    found = step.predict(published_runs.on_hopper(pp)).mfu
    assert found == pytest.approx(published_runs.HOPPER_MFU, abs=0.03)
