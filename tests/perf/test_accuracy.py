"""The errors that predictions carry are those of the committed rows and published runs."""

from __future__ import annotations

import json
from pathlib import Path

import published_runs
import pytest
from published_runs import RUNS, workload

from flux_megatron.lab.perf import accuracy, flops, hardware, step
from flux_megatron.lab.simulate.predictions import predict
from flux_megatron.launch.experiment import load, names

RESULTS = Path(__file__).parents[2] / "docs/results"
ARMS = {"stock": "megatron", "tp_comm_overlap": "te", "flux": "flux"}  # of a row, of a step
H200 = ("h200x2/iterations.jsonl",)
APART = ("h200x2/apart_iterations.jsonl",)
HOST = {"cluster.link.kind": "host", "cluster.link.bandwidth_gbps": 25.0}
# as if cards had the rate of NCCL over the host's memory
CARDS = HOST | {
    "cluster.gpus_per_node": 1, "cluster.nodes": 2,
    "cluster.nics": {"count": 1, "bandwidth_gbps": 25.0 / hardware.NIC_EFFICIENCY, "latency_us": 0},
}  # fmt: skip
IN_FP8 = ("h100x2/fp8_iterations.jsonl", "h100x4/fp8_iterations.jsonl")


def runs(*files, link=None, **values):
    """Rows of the three arms by the run that measured them, over this link if one is given, and
    predicted for the same steps with `values` and the number of layers of the rows.
    """
    text = "".join((RESULTS / file).read_text() for file in files)
    found = {}
    for row in map(json.loads, text.splitlines()):
        if row["arm"] in ARMS and link in (None, row["link"]):
            sizes = (row[name] for name in ("model", "M", "tp", "seq_length", "commit"))
            found.setdefault((*sizes, row.get("micro_batches")), {})[row["arm"]] = row
    return [(of, predicted(next(iter(of.values())), **values)) for of in found.values()]


def predicted(row, **values):
    """Milliseconds of each arm."""
    batch = row["M"] // row["seq_length"]
    sizes = {
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
    arms = ["megatron", "flux"] if values.get("cluster.link.kind") == "host" else []  # no peers
    steps = predict(name, sizes | values, arms).steps
    return {arm: steps[one].step_us * 1e-3 for arm, one in ARMS.items() if one in steps}


def range_of(errors):
    return round(min(errors), 2), round(max(errors), 2)


@pytest.mark.parametrize(
    ("files", "values", "known"),
    [
        (H200, {}, accuracy.KNOWN["H200", "nvlink"]),
        (APART, HOST | {"link": "mailboxes"}, accuracy.KNOWN["H200", "host"]),
        (APART, CARDS | {"link": "host memory"}, accuracy.KNOWN["H200", "cards"]),
        (IN_FP8, {"cluster.gpu": "H100", "training.fp8": "tensorwise"},
         accuracy.KNOWN_IN_FP8["H100", "nvlink"]),
    ],
    ids=["H200", "mailboxes", "machines", "FP8"],
)  # fmt: skip
def test_errors_are_those_of_the_iterations(files, values, known):
    steps, speedups = [], []
    for measured, ms in runs(*files, **values):
        errors = {arm: ms[arm] / row["median_ms"] - 1 for arm, row in measured.items()}
        steps += errors.values()
        if "flux" in errors:
            speedups.append((1 + errors["stock"]) / (1 + errors["flux"]) - 1)
    assert known.of.startswith(f"{len(steps)} iterations")
    assert (known.step, known.speedup) == (range_of(steps), range_of(speedups))


def test_userbuffers_are_predicted_on_the_side_of_stock_where_they_are_measured():
    """Where the measured difference is above 1 %, which the fit's error cannot turn."""
    pairs = [
        (measured["tp_comm_overlap"]["median_ms"] / measured["stock"]["median_ms"], ms)
        for measured, ms in runs(*H200)
        if {"stock", "tp_comm_overlap"} <= {*measured}
    ]
    for line in (RESULTS / "h200x4/iterations.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "tp_comm_overlap_ms" in row:
            row["seq_length"] = 2048 if row["model"].startswith("gpt3") else 4096
            pairs.append((row["tp_comm_overlap_ms"] / row["stock_ms"], predicted(row)))
    clear = [(ratio, ms) for ratio, ms in pairs if abs(ratio - 1) > 0.01]
    assert len(clear) == 9
    for ratio, ms in clear:
        assert (ms["tp_comm_overlap"] / ms["stock"] - 1) * (ratio - 1) > 0


def test_errors_on_a100_are_those_of_published_runs():
    times = [published_runs.seconds(run, full=f) for run in published_runs.RUNS for f in (0, 1)]
    errors = [predicted / published - 1 for published, predicted in times]
    known = accuracy.KNOWN["A100", "nvlink"]
    assert known.of.startswith("eight published runs")
    assert len(errors) == 8
    assert known.step == range_of(errors)


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
