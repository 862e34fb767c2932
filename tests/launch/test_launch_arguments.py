"""Experiments as arguments: what Megatron-LM's parsers take, and what each arm asks for."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

pytest.importorskip("jinja2", reason="needs the extra `launch`")

from launched import GPT, LLAMA, arms, given, launch, variables

from flux_megatron import settings
from flux_megatron.integration import parser_signature
from flux_megatron.launch import experiment, megatron_arguments

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import record_release

RELEASES = parser_signature.releases()
EXPERIMENTS = {name: experiment.load(name) for name in experiment.names()}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", [GPT, LLAMA])
def test_every_recorded_release_takes_the_arguments_of_every_arm(name, release):
    """The launch itself refuses what the experiment's own release does not take."""
    for arm, script in arms(name, "--set", f"megatron_lm={release}", "--save-interval", 9).items():
        assert given(script)["--save-interval"] == ["9"], arm
    assert parser_signature.check(megatron_arguments.resume(Path("/c")), release) == []


WRONG = {
    "an option that is not there": (["--tensor-parallel-size", "8"], "unrecognized arguments"),
    "an abbreviation": (["--tensor-model-parallel", "8"], "unrecognized arguments"),
    "one of a newer release": (["--cuda-graph-modules", "attn"], "unrecognized arguments"),
    "another choice": (["--transformer-impl", "apex"], "invalid choice: 'apex'"),
    "another choice of an enum": (["--attention-backend", "flash3"], "invalid choice"),
    "no number": (["--num-layers", "many"], "invalid int value"),
    "a value of a flag": (["--bf16", "yes"], "unrecognized arguments: yes"),
    "two of three values": (["--rampup-batch-size", "1", "2"], "expected 3 arguments"),
    "a word before all options": (["pretrain"], "unrecognized arguments"),
    "a choice of ours": (["--flux-strategy", "fast"], "invalid choice"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_argument_is_caught(case):
    wrong, error = WRONG[case]
    good = [*wrong, "--swiglu"] if case.startswith("a word") else ["--swiglu", *wrong, "--bf16"]
    words = ", ".join(f'"{word}"' for word in good)
    refused = launch(GPT, "--dry-run", "--set", f"arguments=[{words}]", code=2)
    assert f"{GPT}: arguments: core_v0.16.1: {wrong[0]}" in refused
    assert error in refused


def test_a_recorded_table_keeps_every_option_of_every_release():
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--layers", "--num-layers", type=int)
    parser.add_argument("--fast", action="store_false")
    parser.add_argument("--names", nargs="+", choices=["a", "b"])
    assert record_release.signature_of(parser) == {
        "--layers": "int",
        "--num-layers": "int",
        "--fast": "flag",
        "--names": {"type": "str", "choices": ["a", "b"], "nargs": "+"},
    }
    table = record_release.table(parser_signature.recorded())
    assert table == parser_signature.FILE.read_text()


def test_our_own_options_are_known():
    arguments = ["--flux-overlap", "--flux-layers", "qkv", "fc1", "--flux-compare", "2"]
    assert not parser_signature.check(arguments, "core_v0.16.1")
    (refused,) = parser_signature.check(["--flux-layers", "qvk"], "core_v0.16.1")
    assert "'qvk'" in refused
    assert {"--flux-tune", "--hidden-size"} <= parser_signature.known_options()


SIZES = {
    GPT: "--num-layers 96 --hidden-size 12288 --ffn-hidden-size 49152 --num-attention-heads 96 "
    "--seq-length 2048 --micro-batch-size 2 --global-batch-size 1536 "
    "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 "
    "--position-embedding-type learned_absolute --normalization LayerNorm --train-iters 30 "
    "--seed 1234 --lr 6e-05 --vocab-size 50256 --bf16 --sequence-parallel "
    "--use-distributed-optimizer --mock-data",
    LLAMA: "--num-query-groups 8 --group-query-attention --normalization RMSNorm "
    "--position-embedding-type rope --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights",
}


@pytest.mark.parametrize("name", SIZES)
def test_models_are_rendered_with_their_sizes(name):
    found = given(arms(name)["flux"])
    for option in SIZES[name].split("--")[1:]:
        option, *values = f"--{option}".split()
        assert found[option] == values
    llama_alone = {"--swiglu", "--disable-bias-linear", "--num-query-groups"}
    assert name == LLAMA or not found.keys() & llama_alone
    assert "--save" not in found


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_overlapped_arm_runs_under_sequence_parallelism(name):
    for arm, workload in EXPERIMENTS[name].arms.items():
        found = megatron_arguments.render(workload)
        assert arm == "megatron" or "--sequence-parallel" in found


def test_arms_differ_in_their_layers_alone():
    found = {arm: given(script) for arm, script in arms(GPT).items()}
    of_layers = {
        arm: {key: one.pop(key) for key in [*one] if "overlap" in key or key in ("", "--need")}
        for arm, one in found.items()
    }
    for one in found.values():
        one["--data-cache-path"] = []  # in the arm's folder
    assert found["megatron"] == found["te"] == found["flux"]
    assert found["te"]["--transformer-impl"] == ["transformer_engine"]
    script = "path/to/Megatron-LM/pretrain_gpt.py"
    assert of_layers == {
        "megatron": {"": [script]},
        "te": {"": [script], "--tp-comm-overlap": []},
        "flux": {"": ["flux_megatron.launch", script], "--flux-overlap": []},
    }


@pytest.mark.parametrize(("name", "flash", "impl"), [
    (GPT, False, "local"), (GPT, True, "transformer_engine"),
    (LLAMA, False, "transformer_engine"), (LLAMA, True, "transformer_engine"),
])  # fmt: skip
def test_stock_local_layers_run_what_they_can(name, flash, impl):
    """They have neither flash attention nor RMSNorm under sequence parallelism. Ours are of the
    same specification.
    """
    options = (
        "--set",
        f"training.flash_attention={flash}",
        "--set",
        "training.recompute=selective",
    )
    scripts = arms(name, *options)
    for arm in ("megatron", "flux"):
        found = given(scripts[arm])
        assert found["--transformer-impl"] == [impl]
        assert found["--attention-backend"] == ["auto" if flash else "unfused"]


@pytest.mark.parametrize(("values", "expected"), [
    ("training.recompute=selective", "--recompute-granularity selective"),
    ("training.recompute=full",
     "--recompute-granularity full --recompute-num-layers 1 --recompute-method uniform"),
    ("training.overlap_grad_reduce=true", "--overlap-grad-reduce"),
    ("training.overlap_grad_reduce=true training.overlap_param_gather=true",
     "--overlap-grad-reduce --overlap-param-gather"),
    ("training.dtype=float16", "--fp16"),
    ("parallel.virtual_stages=3", "--num-virtual-stages-per-pipeline-rank 3"),
])  # fmt: skip
def test_values_become_options(values, expected):
    before = given(arms(GPT)["te"])
    options = [text for value in values.split() for text in ("--set", value)]
    found = given(arms(GPT, *options)["te"])
    changed = {key: one for key, one in found.items() if before.get(key) != one}
    assert {f"{key} {' '.join(one)}".strip() for key, one in changed.items()} == {
        f"--{text.strip()}" for text in expected.split("--")[1:]
    }


def test_cpu_needs_neither_apex_nor_nccl():
    for arm, script in arms("cpu/tiny-pretrain_gpt").items():
        found = given(script)
        assert found["--distributed-backend"] == ["gloo"]
        assert found["--transformer-impl"] == ["local"]
        # with it stock layers would run on our kernel
        assert ("--no-gradient-accumulation-fusion" in found) == (arm == "megatron")
        assert found[""] == ["flux_megatron.launch"]
        assert found["--device"] == ["cpu", "path/to/Megatron-LM/pretrain_gpt.py"]
        assert variables(script)["TRITON_INTERPRET"] == "1"
        assert "--need" not in script
    for arm, script in arms(GPT).items():
        assert "TRITON_INTERPRET" not in script
        assert variables(script)["NCCL_DEBUG"] == "WARN"
        assert variables(script)["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
        assert ("--need transformer_engine --need apex" in script) == (arm != "flux")


def test_plans_are_measured_at_the_start_and_kept_in_the_run(tmp_path, monkeypatch):
    """No home folder is needed, and a run's later rounds find them. Those that were measured ahead
    are where the variable says.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLUX_MEGATRON_CACHE", "tuned")
    (script,) = arms(GPT, "--arm", "flux", "--run-dir", tmp_path).values()
    assert variables(script)["FLUX_MEGATRON_CACHE"] == str(tmp_path / "tuned")
    monkeypatch.delenv("FLUX_MEGATRON_CACHE")
    (script,) = arms(GPT, "--arm", "flux", "--run-dir", tmp_path).values()
    set_there = variables(script)
    found = settings.read(set_there)
    assert (found.tune, found.cache) == ("auto", tmp_path / "cache" / "plans")
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert Path(set_there[name]).is_relative_to(tmp_path / "cache")


@pytest.mark.parametrize("name", [n for n, one in EXPERIMENTS.items() if one.program == "train"])
def test_our_own_program_takes_its_configuration(name, tmp_path):
    from flux_megatron.lab.train import config

    launch(name, "--run-dir", tmp_path / "run", "--data-path", tmp_path, "--save-interval", 3,
           "--alternate", 0)  # fmt: skip
    for arm, workload in EXPERIMENTS[name].arms.items():
        run = config.load(tmp_path / "run" / arm / "train.yaml", {})
        assert run.layers == {"megatron": "stock", "flux": "flux"}[arm]
        assert run.model.ffn == workload.model.ffn
        assert run.model.bias == workload.model.linear_bias
        assert run.parallel.world_size == workload.parallel.world_size
        assert run.microbatches(workload.parallel.world_size) == workload.micro_batches
        assert (run.train.save_every, run.train.dtype) == (3, workload.training.dtype)
        assert run.data.path == tmp_path
