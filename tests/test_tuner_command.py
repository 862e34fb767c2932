"""`flux-megatron tune`: which problems a model has, and the whole command on two ranks."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from started import python

from flux_megatron.errors import BadInput, RunFailed
from flux_megatron.problem import Pattern, Plan, Tile
from flux_megatron.tuning import plan_cache

pytest.importorskip("pydantic")

from typer.testing import CliRunner

from flux_megatron import cli
from flux_megatron.tune_command import measure, request
from flux_megatron.tune_command.widths import MODELS, Widths, of_megatron

ROOT = Path(__file__).parents[1]


def test_the_problems_of_a_suite_without_sequence_parallelism():
    model = MODELS["gpt3-175b"]
    found = request.problems_of_model(model, None, [8192], 4, "bfloat16", "cuda", False)
    assert {(p.pattern, p.layout, p.N, p.K) for p in found} == {
        (Pattern.GEMM_AR, "nt", 12288, 12288), (Pattern.GEMM_AR, "nt", 12288, 49152),
        (Pattern.GEMM_AR, "nn", 12288, 36864), (Pattern.GEMM_AR, "nn", 12288, 49152),
    }  # fmt: skip


LLAMA3_8B = Widths(4096, 14336, 32, kv_heads=8, swiglu=True, vocab=128256)
QWEN3_32B = Widths(5120, 25600, 64, kv_heads=8, head_dim=128, swiglu=True)
GPT3 = Widths(12288, 4 * 12288, 96)
# of all ranks: outputs of column layers, inputs of row layers
SHAPES = [
    (LLAMA3_8B, 4096, [6144, 28672, 128256], [4096, 14336]),
    (QWEN3_32B, 5120, [10240, 51200], [8192, 25600]),
    (GPT3, 12288, [36864, 49152], [12288, 49152]),
]


@pytest.mark.parametrize(("widths", "hidden", "outputs", "inputs"), SHAPES, ids=["8b", "32b", "3"])
def test_the_problems_of_any_model(widths, hidden, outputs, inputs):
    found = request.problems_of_model(
        widths.layers(4), widths.vocab, [4096, 8192], 4, "bfloat16", "cuda"
    )
    column = [("nt", Pattern.AG_GEMM, N, hidden) for N in outputs]
    column += [("nn", Pattern.GEMM_RS, hidden, N) for N in outputs]
    row = [("nt", Pattern.GEMM_RS, hidden, K) for K in inputs]
    row += [("nn", Pattern.AG_GEMM, K, hidden) for K in inputs]
    expected = {(M, *shape) for M in (8192, 4096) for shape in column + row}
    assert {(p.M, p.layout, p.pattern, p.N, p.K) for p in found} == expected
    assert len(found) == len(expected)
    assert GPT3.layers(4) == MODELS["gpt3-175b"], "by its widths it is the suite"
    assert [p.beside for p in request.and_beside(found[:1])] == [False, True]


@pytest.mark.parametrize(
    ("words", "model", "tp"),
    [
        (
            "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
            "--group-query-attention --num-query-groups 8 --swiglu --bf16 --data-path a 0.5 b "
            "--tensor-model-parallel-size=4 --flux-overlap",
            replace(LLAMA3_8B, vocab=None), 4,
        ),
        (
            "--hidden-size 5120 --ffn-hidden-size 25600 --num-attention-heads 64 --swiglu "
            "--group-query-attention --num-query-groups 8 --kv-channels 128",
            QWEN3_32B, None,
        ),
        ("--hidden-size 12288 --num-attention-heads 96", GPT3, None),
        # Megatron's defaults: one group, and an ffn of about as many weights
        (
            "--hidden-size 4096 --num-attention-heads 32 --group-query-attention --swiglu",
            Widths(4096, 10880, 32, kv_heads=1, swiglu=True), None,
        ),
        # it has gate and up too, and Megatron's ffn of a layer without
        (
            "--hidden-size 64 --num-attention-heads 8 --quick-geglu",
            Widths(64, 256, 8, swiglu=True), None,
        ),
    ],
    ids=["8b", "32b", "3", "defaults", "quick-geglu"],
)  # fmt: skip
def test_the_widths_of_megatrons_arguments(words, model, tp):
    assert of_megatron(words.split()) == (model, tp)


def test_widths_that_are_not_known_are_refused():
    with pytest.raises(BadInput, match="--multi-latent-attention given, whose layers are not"):
        of_megatron(
            ["--hidden-size", "64", "--num-attention-heads", "8", "--multi-latent-attention"]
        )


@pytest.mark.parametrize("name", ["--suite gpt3-175b,llama2-70b", "--dtype float32,bfloat16"])
def test_one_model_and_one_dtype_are_measured(name):
    done = CliRunner().invoke(cli.app, f"tune --suite gpt3-175b --tp 2 --device cpu {name}".split())
    assert done.exit_code == 2
    assert f"{name.split()[1]!r} given, " in done.output


def test_problems_that_were_not_measured_end_the_command(monkeypatch):
    monkeypatch.setattr(measure.dist, "get_rank", lambda: 0)
    measure.refuse_lacking([1, 2], [1, 2])
    with pytest.raises(RunFailed, match="1 of 2 problems were not measured"):
        measure.refuse_lacking([1, 2], [1])


@pytest.mark.parametrize(
    "words",
    [
        "--hidden 32 --ffn 64 --heads 4 --kv-heads 2 --swiglu --tp 4",
        "-- --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --group-query-attention "
        "--num-query-groups 2 --swiglu --tensor-model-parallel-size 4",
    ],
    ids=["options", "megatron"],
)
def test_the_ranks_of_any_model(words, monkeypatch):
    start, asked, problems = mock.Mock(return_value=0), request.Request.problems, []
    monkeypatch.setattr(request, "start", start)
    monkeypatch.setattr(
        request.Request, "problems", lambda self: problems.append(asked(self)) or problems[0]
    )
    done = CliRunner().invoke(cli.app, f"tune --device cpu --vocab 96 {words}".split())
    assert done.exit_code == 0, done.output
    assert start.call_args.args[:2] == (4, "cpu")
    ((found, name),) = problems
    assert name == "hidden-32_ffn-64_heads-4_kv-heads-2_vocab-96_swiglu"
    assert {(p.N, p.K) for p in found if p.layout == "nt"} == {
        (64, 32), (128, 32), (96, 32), (32, 32), (32, 64),
    }  # fmt: skip


def test_a_plan_as_a_short_text():
    assert measure.label(Plan("sequential")) == "sequential"
    assert measure.label(Plan("pipelined", comm_rows=512)) == "pipelined comm_rows=512"
    plan = Plan("fused", tile=Tile(block_n=256, tma=True))
    assert measure.label(plan) == "fused 128x256x64 g8 w8 s3 tma"


COMMAND = "tune --suite gpt3-175b --tp 2 --M 32 --scale 768 --device cpu --out"


def run_command(cache: Path, out: Path, *more: str) -> str:
    variables = {"FLUX_MEGATRON_CACHE": str(cache), "COLUMNS": "200"}
    words = *COMMAND.split(), out, *more
    return python("-m", "flux_megatron.cli", *words, limit_s=200, **variables).stdout


def test_the_command(tmp_path):
    cache, out = tmp_path / "cache", tmp_path / "tuned"
    first = run_command(cache, out)
    (file,) = out.iterdir()
    assert file.name == "gpt3-175b_tp2_connections-1.json"
    entries, errors = plan_cache.read_folders(out)
    assert errors == []
    assert len(entries) == 8
    assert f"8 entries in {file}" in first
    assert f"8 plans kept in {cache / 'plans'}" in first
    assert " ".join(first.split()).count("12 rounds, noise") == 8
    assert len([*cache.rglob("*.json")]) == 8
    for entry in entries:
        assert {one.plan.strategy for one in entry.measured} >= {"sequential", "fused"}

    for entry in entries:  # as if they had been measured: emulated that takes minutes
        beside = replace(entry.problem, beside=True)
        plan_cache.store(cache / "plans", replace(entry, problem=beside))
    second = run_command(cache, out, "--with-nccl-load")
    assert second.count("(known, noise") == 16
    assert " ".join(second.split()).count(", beside others (") == 8  # titles are wrapped
    both, errors = plan_cache.read_folders(out)
    assert errors == []
    assert both[::2] == entries
    assert [entry.problem.beside for entry in both] == [False, True] * 8
