"""Experiments as arguments: what Megatron-LM's parsers take, and what each arm asks for."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("jinja2", reason="needs the extra `launch`")

from flux_megatron import settings
from flux_megatron.launch import (
    command_line,
    environment,
    experiment,
    megatron_arguments,
    parser_signature,
    train_arguments,
)
from flux_megatron.launch.command_line import RunOptions
from flux_megatron.launch.site import Site

RUN = Path("/runs/one")
RELEASES = parser_signature.releases()
EXPERIMENTS = {name: experiment.load(name) for name in experiment.names()}
OF_MEGATRON = [name for name, one in EXPERIMENTS.items() if one.program == "pretrain_gpt"]
OF_OURS = [name for name, one in EXPERIMENTS.items() if one.program == "train"]
GPT = EXPERIMENTS["paper/gpt3-175b_a100-pcie"].arms
LLAMA = EXPERIMENTS["paper/llama2-70b_h800-nvlink"].arms


def options(arguments: list[str]) -> dict[str, list[str]]:
    """The values of each option, read back."""
    found: dict[str, list[str]] = {}
    for argument in arguments:
        if argument.startswith("--"):
            assert argument not in found, f"{argument} is given twice"
            values = found[argument] = []
        else:
            values.append(argument)
    return found


@pytest.mark.parametrize("name", OF_MEGATRON)
def test_release_takes_every_experiment(name):
    loaded = EXPERIMENTS[name]
    options = RunOptions(run=Path("/a run"), site=Site(), save_interval=10)
    for arm in loaded.arms:
        arguments = command_line.of(loaded, arm, options).arguments
        assert parser_signature.check(arguments, loaded.megatron_lm) == []


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("arms", [GPT, LLAMA], ids=["gpt", "llama"])
def test_every_recorded_release_takes_the_same_arguments(release, arms):
    for workload in arms.values():
        arguments = megatron_arguments.render(workload, data=["a", "b"], save=Path("/c"),
                                              save_interval=1)  # fmt: skip
        assert parser_signature.check(arguments, release) == []


WRONG = {
    "an option that is not there": (["--tensor-parallel-size", "8"], "unrecognized arguments"),
    "an abbreviation": (["--tensor-model-parallel", "8"], "unrecognized arguments"),
    "one of a newer release": (["--cuda-graph-modules", "attn"], "unrecognized arguments"),
    "another choice": (["--transformer-impl", "apex"], "invalid choice: 'apex'"),
    "another choice of an enum": (["--attention-backend", "flash3"], "invalid choice"),
    "no number": (["--num-layers", "many"], "invalid int value"),
    "no whole number": (["--num-layers", "2.5"], "invalid int value"),
    "a value too few": (["--num-layers"], "expected one argument"),
    "a value too many": (["--num-layers", "1", "2"], "unrecognized arguments: 2"),
    "a value of a flag": (["--bf16", "yes"], "unrecognized arguments: yes"),
    "two of three values": (["--rampup-batch-size", "1", "2"], "expected 3 arguments"),
    "a word before all options": (["pretrain"], "unrecognized arguments"),
    "a choice of ours": (["--flux-strategy", "fast"], "invalid choice"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_argument_is_caught(case):
    wrong, error = WRONG[case]
    good = [*wrong, "--swiglu"] if case.startswith("a word") else ["--swiglu", *wrong, "--bf16"]
    (message,) = parser_signature.check(good, "core_v0.16.1")
    assert error in message
    assert message.startswith(f"core_v0.16.1: {wrong[0]}")


def test_release_that_was_not_recorded_is_named():
    with pytest.raises(ValueError, match=r"'core_v0.1' given, one of \['core_v0.14.0', "):
        parser_signature.check([], "core_v0.1")


def test_recorded_options_are_those_of_a_parser():
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--layers", "--num-layers", type=int)
    parser.add_argument("--fast", action="store_false")
    parser.add_argument("--names", nargs="+", choices=["a", "b"])
    assert parser_signature.signature_of(parser) == {
        "--layers": "int",
        "--num-layers": "int",
        "--fast": "flag",
        "--names": {"type": "str", "choices": ["a", "b"], "nargs": "+"},
    }


def test_our_own_options_are_recorded_as_they_are():
    pytest.importorskip("megatron.core", reason="our options are in a room that imports it")
    from flux_megatron.integration.flags import add_flux_arguments

    parser = add_flux_arguments(argparse.ArgumentParser(add_help=False))
    ours = parser_signature.recorded()[parser_signature.OURS]
    assert ours == parser_signature.signature_of(parser)


def test_a_table_of_signatures_keeps_every_option_of_every_release():
    ours = {"--flux": "flag"}
    one = {"--a": "int", "--b": {"type": "str", "choices": ["x"]}, "--flux": "flag"}
    two = {"--a": "int", "--b": "str", "--c": "flag"}
    signatures = {"one": one, "two": two, parser_signature.OURS: ours}
    assert parser_signature.read(parser_signature.table(signatures)) == signatures
    text = parser_signature.FILE.read_text()
    assert parser_signature.table(parser_signature.read(text)) == text


def test_gpt3_is_rendered_with_its_sizes():
    given = options(megatron_arguments.render(GPT["flux"]))
    sizes = {
        "--num-layers": "96", "--hidden-size": "12288", "--ffn-hidden-size": "49152",
        "--num-attention-heads": "96", "--seq-length": "2048", "--micro-batch-size": "2",
        "--global-batch-size": "1536", "--tensor-model-parallel-size": "8",
        "--pipeline-model-parallel-size": "8", "--position-embedding-type": "learned_absolute",
        "--normalization": "LayerNorm", "--train-iters": "30", "--seed": "1234", "--lr": "6e-05",
        "--vocab-size": "50256",
    }  # fmt: skip
    assert {name: " ".join(given[name]) for name in sizes} == sizes
    assert {"--bf16", "--sequence-parallel", "--use-distributed-optimizer"} <= given.keys()
    llama_alone = {"--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights"}
    assert not given.keys() & {*llama_alone, "--num-query-groups"}


def test_llama_is_rendered_with_what_it_has_beyond_gpt():
    given = options(megatron_arguments.render(LLAMA["flux"]))
    assert given["--num-query-groups"] == ["8"]
    assert given["--normalization"] == ["RMSNorm"]
    assert given["--position-embedding-type"] == ["rope"]
    flags = ("--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights")
    assert all(given[flag] == [] for flag in (*flags, "--group-query-attention"))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_overlapped_arm_runs_under_sequence_parallelism(name):
    for arm, workload in EXPERIMENTS[name].arms.items():
        given = options(megatron_arguments.render(workload))
        assert arm == "megatron" or "--sequence-parallel" in given


def test_arms_differ_in_their_layers_alone():
    of_layers = ("--transformer-impl", "--tp-comm-overlap", "--flux-overlap")
    rendered = {arm: options(megatron_arguments.render(GPT[arm])) for arm in GPT}
    layers = {
        a: {k: given.pop(k) for k in of_layers if k in given} for a, given in rendered.items()
    }
    assert layers == {
        "megatron": {"--transformer-impl": ["transformer_engine"]},
        "te": {"--transformer-impl": ["transformer_engine"], "--tp-comm-overlap": []},
        "flux": {"--transformer-impl": ["transformer_engine"], "--flux-overlap": []},
    }
    assert rendered["megatron"] == rendered["te"] == rendered["flux"]


@pytest.mark.parametrize("arm", ["megatron", "flux"])
def test_stock_local_layers_run_what_they_can(arm):
    """They have neither flash attention nor RMSNorm under sequence parallelism. Ours are of the
    same specification.
    """
    for arms, flash, impl in (
        (GPT, False, "local"), (GPT, True, "transformer_engine"),
        (LLAMA, False, "transformer_engine"), (LLAMA, True, "transformer_engine"),
    ):  # fmt: skip
        workload = arms[arm]
        workload = replace(workload, training=replace(workload.training, flash_attention=flash))
        given = options(megatron_arguments.render(workload))
        assert given["--transformer-impl"] == [impl]
        assert given["--attention-backend"] == ["auto" if flash else "unfused"]


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("recompute", "selective", {"--recompute-granularity": ["selective"]}),
        ("recompute", "full", {"--recompute-granularity": ["full"], "--recompute-num-layers": ["1"],
                               "--recompute-method": ["uniform"]}),
        ("overlap_grad_reduce", True, {"--overlap-grad-reduce": []}),
        ("overlap_param_gather", True, {"--overlap-param-gather": []}),
        ("dtype", "float16", {"--fp16": []}),
    ],
)  # fmt: skip
def test_training_becomes_options(field, value, expected):
    before = options(megatron_arguments.render(GPT["flux"]))
    workload = replace(GPT["flux"], training=replace(GPT["flux"].training, **{field: value}))
    given = options(megatron_arguments.render(workload))
    assert {k: v for k, v in given.items() if before.get(k) != v} == expected


def test_stages_are_interleaved():
    workload = replace(GPT["te"], parallel=replace(GPT["te"].parallel, virtual_stages=3))
    given = options(megatron_arguments.render(workload))
    assert given["--num-virtual-stages-per-pipeline-rank"] == ["3"]


def test_checkpoints_and_data_are_only_where_they_are_asked_for():
    without = options(megatron_arguments.render(GPT["flux"], save=Path("/c")))
    assert "--save" not in without
    assert without["--mock-data"] == []
    given = options(
        megatron_arguments.render(GPT["flux"], data=["x", "y"], save=Path("/c"), save_interval=7)
    )
    assert "--mock-data" not in given
    assert given["--data-path"] == ["x", "y"]
    assert (given["--save"], given["--save-interval"]) == (["/c"], ["7"])
    assert "--exit-signal-handler" in given
    resumed = megatron_arguments.resume(Path("/c"))
    assert options(resumed)["--load"] == ["/c"]
    assert not [c for release in RELEASES for c in parser_signature.check(resumed, release)]


def test_cpu_needs_neither_apex_nor_nccl():
    cpu = replace(GPT["megatron"].cluster, gpu="cpu")
    for arm in ("megatron", "flux"):
        workload = replace(GPT[arm], cluster=cpu)
        given = options(megatron_arguments.render(workload))
        assert given["--distributed-backend"] == ["gloo"]
        assert given["--transformer-impl"] == ["local"]
        # with it stock layers would run on our kernel
        assert ("--no-gradient-accumulation-fusion" in given) == (arm == "megatron")
        assert megatron_arguments.needs_bootstrap(workload)
        assert environment.variables(workload, RUN)["TRITON_INTERPRET"] == "1"
    assert not megatron_arguments.needs_bootstrap(GPT["megatron"])
    on_gpus = environment.variables(GPT["flux"], RUN)
    assert on_gpus["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert "TRITON_INTERPRET" not in on_gpus


def test_plans_are_measured_at_the_start_and_kept_in_the_run():
    """No home folder is needed, and a run's later rounds find them."""
    variables = environment.variables(GPT["flux"], RUN)
    found = settings.read(variables)
    assert (found.tune, found.cache) == ("auto", RUN / "cache" / "plans")
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert Path(variables[name]).is_relative_to(RUN / "cache")
    assert variables["NCCL_DEBUG"] == "WARN"


@pytest.mark.parametrize("name", OF_OURS)
def test_our_own_program_takes_its_configuration(name, tmp_path):
    from flux_megatron.lab.train import config

    file = tmp_path / "train.yaml"
    for arm, workload in EXPERIMENTS[name].arms.items():
        file.write_text(train_arguments.render(workload, data=tmp_path, save_interval=3))
        run = config.load(file, {})
        assert run.layers == {"megatron": "stock", "flux": "flux"}[arm]
        assert run.model.ffn == workload.model.ffn
        assert run.model.bias == workload.model.linear_bias
        assert run.parallel.world_size == workload.parallel.world_size
        assert run.microbatches(workload.parallel.world_size) == workload.micro_batches
        assert run.train.save_every == 3
        assert run.train.dtype == workload.training.dtype
        assert run.data.path == tmp_path
