"""From run folders to their report: step times, speedups, losses, and every output."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner
from without_torch import without_torch
from written_runs import (
    correlated,
    losses,
    megatron_line,
    megatron_process,
    megatron_run,
    run_folder_of,
    train_rows,
    write,
)

from flux_megatron.cli import app
from flux_megatron.lab.perf import flops
from flux_megatron.lab.results import logs, report, summary
from flux_megatron.lab.results.iterations import Iteration, Series
from flux_megatron.launch.experiment import load

ROOT = Path(__file__).parents[2]
PAPER = "paper/gpt3-175b_a100-pcie"


def invoke(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["results", *map(str, arguments)])
    return done.exit_code, done.output


@pytest.fixture
def experiment():
    return load(PAPER)


@pytest.fixture
def finished(tmp_path, experiment):
    """60 iterations, the paper's best case: 24 % faster than Megatron, 37 % than TE."""
    medians = {"megatron": 12.4, "te": 13.7, "flux": 10.0}
    times = {
        arm: correlated(seed, 60, 0.5, median, 0.01)
        for seed, (arm, median) in enumerate(medians.items(), start=50)
    }
    return megatron_run(tmp_path / "run", experiment, times)


def test_json_on_stdout_stands_alone_and_needs_no_torch(finished):
    done = without_torch("results", finished, "--json", "-")
    (found,) = json.loads(done.stdout)
    assert found["speedups"]
    assert "not significant" in done.stderr or "faster" in done.stderr


def test_a_finished_run_stands_beside_the_paper(finished, tmp_path):
    code, output = invoke(finished, "--json", tmp_path / "all.json")
    assert code == 0, output
    (found,) = json.loads((tmp_path / "all.json").read_text())
    by_pair = {(one["arm"], one["baseline"]): one for one in found["speedups"]}
    over_megatron = by_pair["flux", "megatron"]
    assert over_megatron["paper"] == "up to 1.24"
    low, high = over_megatron["speedup"]["interval"]
    assert low < 1.24 < high
    assert over_megatron["speedup"]["verdict"] == "faster"
    assert by_pair["flux", "te"]["paper"] == "up to 1.37"
    assert by_pair["te", "megatron"]["speedup"]["verdict"] == "slower"
    arm = found["runs"][0]["arms"]["flux"]
    workload = load(PAPER).arms["flux"]
    assert arm["timed"] == 60 - workload.training.warmup_steps
    assert arm["step"]["median"] == pytest.approx(10, rel=0.01)
    tokens = workload.model.seq_length * workload.training.global_batch
    assert arm["tokens_per_second"] == pytest.approx(tokens / arm["step"]["median"])
    assert arm["mfu"] == pytest.approx(flops.mfu(workload, arm["step"]["median"]))
    shown = ("128 x A100-PCIE-80GB", "up to 1.24", "flux over megatron", "within")
    assert all(word in output for word in shown)


def test_repeats_are_compared_pair_by_pair(tmp_path, experiment):
    """Every run has its own level, both arms alike: only pairs can see 5 %."""
    folders = [
        megatron_run(
            tmp_path / f"run{i}",
            experiment,
            {
                "megatron": correlated(i, 60, 0.5, 10.5 * level, 0.01),
                "flux": correlated(i + 9, 60, 0.5, 10 * level, 0.01),
            },
        )
        for i, level in enumerate((1.0, 1.2, 0.9, 1.1))
    ]
    (found,) = report.reports([one for folder in folders for one in report.read(folder)])
    (together,) = (one for one in found.speedups if one.run is None)
    assert together.speedup.runs == 4
    low, high = together.speedup.interval
    assert low < 1.05 < high
    assert together.speedup.verdict == "faster"
    code, output = invoke(*folders)
    assert code == 0
    assert sum("flux over megatron" in line for line in output.splitlines()) == 5
    assert "no iterations of te" in output


def test_runs_of_different_values_are_no_repeats(tmp_path, experiment):
    other = load(PAPER, {"training.micro_batch": 1})
    folders = [
        megatron_run(tmp_path / str(i), one, {"flux": [10.0] * 12})
        for i, one in enumerate((experiment, other))
    ]
    runs = [one for folder in folders for one in report.read(folder)]
    assert len(report.reports(runs)) == 2
    released = dataclasses.replace(experiment, megatron_lm="core_v0.19.0")
    runs += report.read(megatron_run(tmp_path / "2", released, {"flux": [10.0] * 12}))
    assert len(report.reports(runs)) == 3
    assert invoke(folders[0], folders[0], tmp_path / "1" / ".." / "0") == invoke(folders[0])


def test_rounds_of_a_run_are_its_repeats(tmp_path, experiment):
    """Also before the last one has begun, and before the first has an iteration."""
    rounds = [tmp_path / "run" / f"round-{number}" for number in (1, 2, 3)]
    for one in rounds:
        run_folder_of(one, experiment)
    code, output = invoke(tmp_path / "run")
    assert (code, output.count("no iteration of any arm")) == (2, 1)
    for one, level in zip(rounds[:2], (1.0, 1.2), strict=True):
        times = {"megatron": [10.5 * level] * 30, "flux": [10 * level] * 30}
        megatron_run(one, experiment, times)
    code, output = invoke(tmp_path / "run")
    assert code == 0, output
    speedups = [line.split() for line in output.splitlines() if "flux over megatron" in line]
    assert [line[0] for line in speedups] == ["1", "2", "all"]
    assert f"{rounds[2]}: no iterations of megatron, te, flux" in output


def test_a_restart_is_reported_and_its_warm_up_left_out(tmp_path, experiment):
    folder = run_folder_of(tmp_path / "run", experiment)
    warmup = experiment.arms["flux"].training.warmup_steps
    batch = experiment.arms["flux"].training.global_batch
    for name, text in {
        "0": megatron_process([1.0] * 40, losses(40)),
        "1": megatron_process([5.0] * warmup + [1.0] * 20, [3.0] * (warmup + 20), 31, clock=99),
    }.items():
        text = text.replace("batch size:     8", f"batch size: {batch:5d}")
        write(folder / "flux" / "logs" / name, text + " [2026-11-21 12:00:00.1] iteration")
    code, output = invoke(folder)
    assert code == 0
    assert "restarted at iteration 31" in output
    assert "10 iterations done again after a restart" in output
    assert "2 unfinished last lines left out" in output
    (found,) = report.reports(report.read(folder))
    assert found.arms[0]["flux"].timed == 30 - warmup + 20
    assert found.arms[0]["flux"].step.median == 1.0


@pytest.mark.parametrize("release", [(0, 15), (0, 19)])
def test_skipped_iterations_are_counted_but_not_timed(tmp_path, experiment, release):
    """Without the optimizer they take half as long; one of them lost its loss too."""
    workload = experiment.arms["flux"]
    batch, last = workload.training.global_batch, workload.training.warmup_steps + 20
    skips = {last - 2: 0, last - 9: 1}
    lines = [
        megatron_line(n, 0.5, None, release, n, skipped=1, nan=skips[n], batch=batch)
        if n in skips
        else megatron_line(n, 1.0, 9.0, release, n, batch=batch)
        for n in range(1, last + 1)
    ]
    write(tmp_path / "rank.log", "\n".join(lines) + "\n")
    found = logs.of_megatron(tmp_path, batch)
    assert summary.warm_times(found, workload.training.warmup_steps) == [1.0] * 18
    arm = summary.summarise(found, workload)
    assert (arm.timed, arm.skipped, arm.nan, arm.spread) == (18, 2, 1, (1.0, 1.0))


def test_a_training_of_ours(tmp_path):
    """Rows of a real training as both arms, a millinat added to one of them from step 51 on."""
    folder = run_folder_of(tmp_path / "run", load("cpu/tiny"))
    rows = (ROOT / "docs" / "results" / "h200x4" / "train_flux.jsonl").read_text()
    write(folder / "megatron" / "train" / "metrics.jsonl", rows)
    moved = [
        Iteration(row["step"], row["step"], row["seconds"], row["loss"] + 1e-3 * (row["step"] > 50))
        for row in map(json.loads, rows.splitlines())
    ]
    write(folder / "flux" / "train" / "metrics.jsonl", train_rows(moved))
    (found,) = report.reports(report.read(folder))
    (pair,) = found.losses
    assert pair.parity.common == 200
    assert pair.parity.first_different == 51
    assert pair.parity.max == pytest.approx(1e-3, rel=1e-6)
    assert pair.parity.mean == pytest.approx(0.75e-3, rel=1e-6)
    assert (pair.parity.measure, pair.parity.bound) == ("max", 2e-5)
    assert not pair.parity.within
    (speedup,) = found.speedups
    assert speedup.speedup.verdict == "not significant"
    assert found.arms[0]["flux"].mfu is None  # nobody knows a CPU's peak
    assert found.plain()["machine"] == "4 ranks on a CPU, kernels interpreted"
    assert "DIFFERENT" in invoke(folder)[1]
    assert "within" in invoke(folder, "--loss-bound", "0.002")[1]


def series(*iterations: tuple[int, int, float | None]) -> Series:
    return Series(tuple(Iteration(n, since, 1.0, loss) for n, since, loss in iterations), (1,))


def test_losses_that_are_means_over_different_iterations_are_not_compared():
    """After a restart Megatron's second line is a mean of two iterations."""
    smooth = series((1, 1, 9.0), (2, 1, 8.5), (3, 3, 7.0), (4, 4, 6.0))
    again = series((1, 1, 9.0), (2, 1, 8.5), (3, 3, 7.0), (4, 3, 6.5))
    assert summary.loss_differences(smooth, again) == {1: 0, 2: 0, 3: 0}


def test_a_loss_that_is_no_number_never_agrees():
    broken = series((1, 1, 9.0), (2, 2, float("nan")), (3, 3, None))
    fine = series((1, 1, 9.0), (2, 2, 8.0), (3, 3, 7.0))
    found = summary.parity(broken, fine, "bfloat16")
    assert (found.common, found.first_different) == (2, 2)
    assert not found.within
    assert summary.parity(fine, series((9, 9, 1.0)), "bfloat16") is None


def test_what_cannot_be_read_is_reported(tmp_path, experiment):
    assert invoke(tmp_path)[0] == 2
    assert "experiment.json" in invoke(tmp_path)[1]
    folder = run_folder_of(tmp_path / "run", experiment)
    code, output = invoke(folder)
    assert code == 2
    assert "no iteration of any arm" in output
    file = write(folder / "flux" / "logs" / "rank.log", megatron_process([1.0] * 3, losses(3)))
    code, output = invoke(folder)
    assert code == 2
    assert f"{file}:3: global batch size 8, but the experiment has" in output


def test_model_flops_are_those_megatron_counts(experiment):
    """6 per parameter and token, and attention's: 175B has 174.6e9 of them with its positions."""
    workload = experiment.arms["flux"]
    model, training = workload.model, workload.training
    tokens = model.seq_length * training.global_batch
    parameters = 12 * model.layers * model.hidden**2 + model.vocab * model.hidden
    attention = 6 * model.layers * model.hidden * model.seq_length  # the causal half
    assert flops.model_flops(workload) == pytest.approx(tokens * (6 * parameters + attention))
    second = flops.mfu(workload, 1.0)
    assert second == pytest.approx(flops.model_flops(workload) / (128 * 312e12))
    assert flops.mfu(workload, 2.0) == pytest.approx(second / 2)
    llama = load("paper/llama2-70b_a100-pcie").arms["flux"]
    matrices = 80 * (8192 * (8192 * 2 + 2 * 1024) + 3 * 8192 * 28672) + 32000 * 8192
    s = llama.model.seq_length
    expected = s * llama.training.global_batch * (6 * matrices + 6 * 80 * 8192 * s)
    assert flops.model_flops(llama) == pytest.approx(expected)
