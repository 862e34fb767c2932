"""`flux-megatron tune`: which problems a model has, and the whole command on two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flux_megatron.problem import Pattern, Plan, Problem, Tile
from flux_megatron.tuning import plan_cache

pytest.importorskip("rich")
pytest.importorskip("pydantic")

from typer.testing import CliRunner

from flux_megatron import cli
from flux_megatron.lab.bench import tune, tune_request
from flux_megatron.lab.train import config as configs

ROOT = Path(__file__).parents[1]
SMALL = ["--suite", "gpt3-175b", "--tp", "2", "--M", "32", "--scale", "768", "--device", "cpu"]


def test_the_problems_of_a_suite():
    found = tune_request.problems_of_suite("gpt3-175b", [8192], 4, "bfloat16", "cuda")
    assert len(found) == len(set(found)) == 8
    fc1 = Problem(Pattern.AG_GEMM, 8192, 49152, 12288, "bfloat16", 4)
    fc1_dgrad = Problem(Pattern.GEMM_RS, 8192, 12288, 49152, "bfloat16", 4, layout="nn")
    proj_dgrad = Problem(Pattern.AG_GEMM, 8192, 12288, 12288, "bfloat16", 4, layout="nn")
    assert {fc1, fc1_dgrad, proj_dgrad} <= set(found)


def test_the_problems_of_a_suite_without_sequence_parallelism():
    found = tune_request.problems_of_suite(
        "gpt3-175b", [8192], 4, "bfloat16", "cuda", sequence_parallel=False
    )
    assert {(p.pattern, p.layout, p.N, p.K) for p in found} == {
        (Pattern.GEMM_AR, "nt", 12288, 12288), (Pattern.GEMM_AR, "nt", 12288, 49152),
        (Pattern.GEMM_AR, "nn", 12288, 36864), (Pattern.GEMM_AR, "nn", 12288, 49152),
    }  # fmt: skip


def test_the_problems_of_a_run():
    run = configs.load(ROOT / "configs/train/h200.yaml", {"model.swiglu": True})
    found = tune_request.problems_of_config(run, "cuda")
    # qkv, gate and up, the LM head; proj and down; each with its dual
    assert len(found) == len(set(found)) == 10
    assert {problem.M for problem in found} == {2 * 2048}
    shape = {(p.pattern, p.layout, p.N, p.K) for p in found}
    assert (Pattern.AG_GEMM, "nt", 2 * 8192, 2048) in shape
    assert (Pattern.GEMM_RS, "nn", 2048, 2 * 8192) in shape
    assert (Pattern.GEMM_RS, "nt", 2048, 8192) in shape
    assert (Pattern.AG_GEMM, "nn", 8192, 2048) in shape
    assert (Pattern.AG_GEMM, "nt", run.padded_vocab, 2048) in shape


def test_the_problems_of_a_run_without_sequence_parallelism():
    run = configs.load(ROOT / "configs/train/h200.yaml", {"parallel.sequence_parallel": False})
    found = tune_request.problems_of_config(run, "cuda")
    assert {(p.pattern, p.M) for p in found} == {(Pattern.GEMM_AR, 2 * 2048)}
    assert {(p.layout, p.N, p.K) for p in found} == {
        ("nt", 2048, 2048), ("nt", 2048, 8192),  # proj and down
        ("nn", 2048, 3 * 2048), ("nn", 2048, 8192), ("nn", 2048, run.padded_vocab),
    }  # fmt: skip


def test_a_run_without_problems():
    run = configs.load(ROOT / "configs/train/demo.yaml", {"parallel.tp": 1})
    with pytest.raises(ValueError, match="only layers over several ranks have plans"):
        tune_request.problems_of_config(run, "cpu")


def test_each_problem_alone_and_beside():
    (one, *_) = tune_request.problems_of_suite("gpt3-175b", [8192], 4, "bfloat16", "cuda")
    assert tune_request.and_beside([one]) == [one, beside(one)]
    assert not one.beside


def beside(problem: Problem) -> Problem:
    return replace(problem, beside=True)


def test_a_plan_as_a_short_text():
    assert tune.label(Plan("sequential")) == "sequential"
    assert tune.label(Plan("pipelined", comm_rows=512)) == "pipelined comm_rows=512"
    plan = Plan("fused", tile=Tile(block_n=256, tma=True))
    assert tune.label(plan) == "fused 128x256x64 g8 w8 s3 tma"


def run_command(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flux_megatron.cli", "tune", *arguments],
        env=os.environ | {"FLUX_MEGATRON_CACHE": str(cache), "COLUMNS": "200"},
        cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip


def test_the_command(tmp_path):
    cache, out = tmp_path / "cache", tmp_path / "tuned"
    first = run_command(cache, *SMALL, "--out", str(out))
    assert first.returncode == 0, first.stderr
    (file,) = out.iterdir()
    assert file.name == "gpt3-175b_tp2_connections-1.json"
    entries, errors = plan_cache.read_folder(out)
    assert errors == []
    assert len(entries) == 8
    assert f"8 entries in {file}" in first.stdout
    assert f"8 plans kept in {cache / 'plans'}" in first.stdout
    assert " ".join(first.stdout.split()).count("12 rounds, noise") == 8
    assert len([*cache.rglob("*.json")]) == 8
    for entry in entries:
        assert {one.plan.strategy for one in entry.measured} >= {"sequential", "fused"}

    for entry in entries:  # as if they had been measured: emulated that takes minutes
        plan_cache.store(cache / "plans", replace(entry, problem=beside(entry.problem)))
    second = run_command(cache, *SMALL, "--with-nccl-load", "--out", str(out))
    assert second.returncode == 0, second.stderr
    assert second.stdout.count("(known, noise") == 16
    said = " ".join(second.stdout.split())  # titles are wrapped
    assert said.count(", beside others (") == 8
    both, errors = plan_cache.read_folder(out)
    assert errors == []
    assert both[::2] == entries
    assert [entry.problem.beside for entry in both] == [False, True] * 8


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "one of --config and --suite is needed"),
        (["--suite", "gpt5"], "--suite 'gpt5' given, one of"),
        (["--suite", "gpt3-175b", "--device", "cpu", "--M", "63"], "of the 2 ranks expected"),
        (["--config", "none.yaml"], "none.yaml: No such file"),
    ],
)
def test_bad_arguments(arguments, said):
    done = CliRunner().invoke(cli.app, ["tune", *arguments])
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())
