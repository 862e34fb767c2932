"""The measurement of whole iterations, with ranks that only print what Megatron would."""

from __future__ import annotations

import json
import re

import iterations
import pytest
import typer

RANK = """
import os, pathlib, sys, time

gate, words = pathlib.Path(sys.argv[2]), sys.argv[3:]
steps, batch, block = (
    int(words[words.index(name) + 1]) if name in words else 0
    for name in ("--train-iters", "--global-batch-size", "--flux-compare")
)
while not gate.exists():
    time.sleep(0.01)
for i in range(1, steps + 1):
    stock = block and (i - 1) // block % 2 == 0
    milliseconds = (120 if stock else 100) + i % 3
    if os.environ["RANK"] == "1":
        print(f" [2026-11-21 18:00:{i % 60:02}] iteration {i}/ {steps} | "
              f"elapsed time per iteration (ms): {milliseconds} | global batch size: {batch} | "
              "lm loss: 1.0 | number of skipped iterations: 0 | number of nan iterations: 0 |")
"""


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """The script that stands for a rank."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    monkeypatch.setattr(iterations, "RANK", str(script))
    monkeypatch.setattr(iterations, "machine_of", lambda *_: {"gpu": "none"})
    monkeypatch.setattr(iterations, "EXPERIMENTS", iterations.EXPERIMENTS[:1])
    return script


def test_jobs_have_the_rows_that_were_asked_for():
    for experiment in iterations.EXPERIMENTS:
        for M in (8192, 2048):
            compare, userbuffers = iterations.jobs(experiment, M, 2, ["--more"])
            assert compare.M == userbuffers.M == M
            assert {compare.workload.parallel.tp, compare.workload.cluster.gpus_per_node} == {2}
            assert compare.arguments[0] == userbuffers.arguments[0] == "--more"


def test_a_step_of_several_micro_batches():
    for job in iterations.jobs(iterations.EXPERIMENTS[1], 8192, 4, [], micro_batches=8):
        assert (job.M, job.workload.micro_batches) == (8192, 8)


def test_two_replicas_share_the_work_beside_each_other():
    for job in iterations.jobs(iterations.EXPERIMENTS[0], 8192, 2, [], 8, layout="dp"):
        assert (job.M, job.workload.micro_batches, job.workload.training.global_batch) == (
            8192, 8, 64,
        )  # fmt: skip
        words = iterations.megatron_arguments.render(job.workload)
        for flag in ("distributed-optimizer", "grad-reduce", "param-gather"):
            assert sum(word.endswith(flag) for word in words) == 1
        assert job.workload.parallel.world_size == job.workload.cluster.gpus_per_node == 4


def test_two_stages_interleave():
    for experiment in iterations.EXPERIMENTS:
        compare, te = iterations.jobs(experiment, 2048, 2, [], 8, layout="pp")
        for job in (compare, te):
            words = iterations.megatron_arguments.render(job.workload)
            for name in ("pipeline-model-parallel-size", "num-virtual-stages-per-pipeline-rank"):
                assert words[words.index(f"--{name}") + 1] == "2"
            assert job.workload.parallel.world_size == job.workload.cluster.gpus_per_node == 4


def test_one_micro_batch_cannot_interleave():
    with pytest.raises(ValueError, match="interleaved micro-batches"):
        [*iterations.jobs(iterations.EXPERIMENTS[0], 2048, 2, [], 1, layout="pp")]


def test_arms_in_graphs_take_turns():
    graphs = iterations.jobs(iterations.EXPERIMENTS[0], 2048, 2, [], arms=["graphs"])
    stock, flux, *again = graphs
    assert [job.name for job in again] == [stock.name, flux.name] == ["stock_graphs", "flux_graphs"]
    assert (stock.workload.arm, flux.workload.arm) == ("megatron", "flux")
    assert stock.arguments == flux.arguments


def test_rows_of_an_arm_in_graphs(ranks, tmp_path):
    iterations.main(tmp_path, tmp_path / "rows.jsonl", tp=2, M="2048", arms="graphs")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["arm"] for row in rows] == ["stock_graphs", "flux_graphs"] * 2
    assert {len(row["times_ms"]) for row in rows} == {30}


def test_rows_of_all_arms(ranks, tmp_path):
    iterations.main(tmp_path, tmp_path / "rows.jsonl", tp=2, M="2048")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {row["arm"]: len(row["times_ms"]) for row in rows} == {
        "stock": 36, "flux": 36, "tp_comm_overlap": 30,
    }  # fmt: skip
    stock, flux = (row["median_ms"] for row in rows[:2])
    assert (stock, flux) == (121, 101)
    assert rows[1]["speedup_low_middle_high"][1] == pytest.approx(121 / 101, abs=1e-3)


def test_a_short_comparison_and_a_long_run_of_ours(ranks, tmp_path):
    out = tmp_path / "rows.jsonl"
    where = {"tp": 1, "layout": "dp", "M": "2048", "micro_batches": 2}
    iterations.main(tmp_path, out, **where, arms="compare,flux", block=3, pairs=2, timed=50)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["arm"], len(row["times_ms"])) for row in rows] == [
        ("stock", 4), ("flux", 4), ("flux", 50),
    ]  # fmt: skip
    assert {(row["tp"], row["dp"], row["pp"], row["micro_batches"]) for row in rows} == {
        (1, 2, 1, 2)
    }


def test_a_failed_process_is_reported_and_the_others_still_run(ranks, tmp_path, capsys):
    ranks.write_text(
        "import sys\nif '--tp-comm-overlap' in sys.argv: sys.exit('no such thing')" + RANK
    )
    with pytest.raises(typer.Exit) as end:
        iterations.main(tmp_path, tmp_path / "rows.jsonl", tp=2, M="4096,2048")
    assert end.value.exit_code == 1
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["arm"] for row in rows] == ["stock", "flux"] * 2
    said = capsys.readouterr().err
    for M in (4096, 2048):  # by one rank at least: torchrun may end the other before it has spoken
        assert re.search(rf"tp_comm_overlap, M {M}: 1\n\s*no such thing\n", said)


def test_a_measurement_of_nothing_fails(ranks, tmp_path):
    with pytest.raises(typer.Exit) as end:
        iterations.main(tmp_path, tmp_path / "rows.jsonl", models="no such model")
    assert end.value.exit_code == 1


def test_models_of_fewer_layers_have_another_name():
    for job in iterations.jobs(iterations.EXPERIMENTS[0], 2048, 2, [], layers=2):
        assert job.workload.model.name == "gpt3-175b-2-layers"
        assert job.words[job.words.index("--num-layers") + 1] == "2"


def test_the_end_of_a_log_is_what_a_rank_said(tmp_path):
    """A dump of threads ends with a list of modules that is longer than all that was of use."""
    log = tmp_path / "stderr.log"
    log.write_text("first\n" + "a line\n" * 1000 + "stuck here\nExtension modules: " + "m, " * 2000)
    assert iterations._end_of(log).endswith("a line\nstuck here")
    assert len(iterations._end_of(log)) == 3000
