"""Our arguments in Megatron's parser, what they refuse and what they build."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import side_by_side as sbs
import torch
from megatron.core.extensions import transformer_engine
from megatron.core.models import backends
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import transformer_block
from megatron.core.transformer.moe.experts import SequentialMLP
from ranks import on_cpu_ranks
from side_by_side import parse
from test_replaced import changed, core

from flux_megatron import settings
from flux_megatron.integration import install, provider, requirements, resolved
from flux_megatron.integration.attention import FluxCoreAttention
from flux_megatron.integration.flags import FluxOptions, add_flux_arguments, options_from
from flux_megatron.integration.layers import FluxColumnParallelLinear, layer_of
from flux_megatron.integration.norm import FluxNorm
from flux_megatron.integration.provider import FluxSpecProvider
from flux_megatron.integration.requirements import OUR_SPEC, refusals
from flux_megatron.integration.resolved import overlapped_in


def test_flags_become_options():
    assert options_from(parse()) is None
    assert options_from(parse("--flux-overlap")) == FluxOptions()
    assert FluxOptions().environment() == {}
    line = (
        "--flux-overlap --flux-layers fc1 head --flux-strategy fused --flux-tune on "
        "--flux-tune-seconds 7 --flux-cache plans --flux-strict --flux-trace --flux-save-gathered "
        "--flux-allow sft train_step"
    )
    given = options_from(parse(*line.split()))
    assert given == FluxOptions(
        layers=("fc1", "head"), strategy="fused", save_gathered=True, tune="on",
        tune_seconds=7.0, cache="plans", strict=True, trace=True, allow=("sft", "train_step"),
    )  # fmt: skip
    assert settings.read(given.environment()) == settings.Settings(
        strategy="fused", strict=True, tune="on", tune_seconds=7.0, cache=Path("plans"),
        nvtx=True, allow=("sft", "train_step"),
    )  # fmt: skip


def test_arguments_are_added_once():
    parser = add_flux_arguments(argparse.ArgumentParser())
    assert add_flux_arguments(parser) is parser


def test_knob_without_the_flag_is_refused():
    with pytest.raises(
        ValueError, match="--flux-tune-seconds --flux-strict given without --flux-o"
    ):
        options_from(parse("--flux-tune-seconds", "7", "--flux-strict"))


@pytest.mark.parametrize("mode", ["flux_deterministic", "deterministic_mode"])
def test_deterministic_runs_measure_nothing(mode):
    args = parse("--flux-overlap")
    setattr(args, mode, True)
    assert options_from(args).environment() == {"FLUX_MEGATRON_TUNE": "off"}
    args.flux_tune = "on"
    with pytest.raises(ValueError, match="--flux-tune on given with --flux-deterministic"):
        options_from(args)


COMBINATIONS = [
    ("transformer_impl", "inference_optimized", "--transformer-impl inference_optimized"),
    ("position_embedding_type", "relative", "--position-embedding-type relative"),
    ("context_parallel_size", 2, "--context-parallel-size"),
    ("export_kd_teacher_load", "teacher", "--export-kd-teacher-load"),
    ("export_real_quant_cfg", "fp8_real_quant", "--export-real-quant-cfg"),
    ("modelopt_enabled", True, "--modelopt-enabled"),
]


@pytest.mark.parametrize(("name", "value", "flag"), COMBINATIONS)
def test_unsupported_combination_is_refused_by_name(name, value, flag):
    args = parse("--flux-overlap")
    setattr(args, name, value)
    before = gpt_layer_specs.LocalSpecProvider
    with pytest.raises(ValueError, match=f"cannot go with:\n  {flag}: "):
        install.install_from(args)
    assert gpt_layer_specs.LocalSpecProvider is before


def test_norms_of_queries_that_megatron_would_drop_are_refused(monkeypatch):
    args = parse("--flux-overlap")
    args.qk_l2_norm = True
    (refusal,) = refusals(args, {})
    assert str(refusal).startswith("--qk-l2-norm: Megatron drops it")
    args.num_experts = 2  # Megatron passes it on layer by layer
    assert not refusals(args, {})
    args.num_experts, args.spec = None, OUR_SPEC
    assert not refusals(args, {})
    args.spec = None
    monkeypatch.setattr(requirements, "te_can_run", lambda: True)
    assert not refusals(args, {})


@on_cpu_ranks(1)
def test_nothing_is_installed_without_the_flag(rank):
    before, args = core(), parse()
    install.install_from(args)
    assert not changed(before)
    assert args.transformer_impl == "transformer_engine"


def local_spec(**options: Any) -> Any:
    return gpt_layer_specs.get_gpt_layer_local_spec(**options)


def built(spec: Any, **more: Any) -> GPTModel:
    """As in a real launch: fusion is on, and there is no apex."""
    config = sbs.settings(1, False, torch.float32, gradient_accumulation_fusion=True, **more)
    return GPTModel(config, spec, vocab_size=8, max_sequence_length=8)


@sbs.on_tp_ranks(1)
def test_installing_twice_is_installing_once(rank):
    args = parse("--flux-overlap", "--flux-strategy", "sequential", "--flux-save-gathered")
    args.spec, args.cuda_graph_impl, args.context_parallel_size = OUR_SPEC, "none", 1
    assert settings.get().strategy != "sequential"  # it has been read before
    requirements._logged.clear()
    said = io.StringIO()
    for _ in range(2):
        args.transformer_impl = "transformer_engine"  # Megatron parses anew
        with contextlib.redirect_stdout(said):
            install.install_from(args)
        assert not hasattr(ColumnParallelLinear.__init__.__wrapped__, "__wrapped__"), "once"
        assert gpt_layer_specs.LNImpl is transformer_block.LayerNormImpl is FluxNorm
        assert settings.get().strategy == "sequential"
        assert FluxColumnParallelLinear.save_gathered
    assert args.transformer_impl == "local"
    assert said.getvalue().count("--transformer-impl local, not transformer_engine") == 1
    install.install(FluxOptions(layers=("fc1",)))
    assert sbs.ours(built(local_spec(normalization="RMSNorm"))) == {"linear_fc1"}


@pytest.mark.parametrize("reset", [True, False])
@on_cpu_ranks(1)
def test_attention_reads_masks_where_documents_end_within_a_sample(rank, reset):
    args = parse("--flux-overlap")
    args.reset_attention_mask = reset
    install.install_from(args)
    assert FluxCoreAttention.reads_causal_masks is reset


@pytest.mark.parametrize(
    ("requested", "of_te", "can_run", "layers", "message"),
    [
        ("transformer_engine", True, True, None, "transformer_engine: linear layers "
         "are ours, with the norms inside them; experts and all else are TransformerEngine's"),
        ("transformer_engine", True, True, ("qkv", "head"), "transformer_engine: linear layers "
         "(qkv head) are ours, with the norms inside them; experts and all else are "
         "TransformerEngine's"),
        ("transformer_engine", False, False, None, "local, not transformer_engine: linear layers "
         "and norms are ours, attention is torch's"),
        ("local", False, True, ("fc1",), "local: linear layers (fc1) and norms are "
         "ours, attention is TransformerEngine's"),
    ],
)  # fmt: skip
def test_the_message_names_what_is_built(monkeypatch, requested, of_te, can_run, layers, message):
    monkeypatch.setattr(install, "te_can_run", lambda: can_run)
    assert install._what_is_built(requested, of_te, layers) == f"--transformer-impl {message}"


OURS = {
    (): "linear_qkv linear_proj linear_fc1 linear_fc2 output_layer",
    ("qkv", "fc2"): "linear_qkv linear_fc2",
    ("proj", "head"): "linear_proj output_layer",
}


@pytest.mark.parametrize("layers", OURS)
@sbs.on_tp_ranks(1)
def test_chosen_layers_are_ours_and_the_others_stock(rank, layers):
    install.install_from(parse("--flux-overlap", *(["--flux-layers", *layers] if layers else [])))
    model = built(local_spec(normalization="RMSNorm"))
    assert "FluxNorm" in repr(gpt_layer_specs.LNImpl)
    assert type(model.decoder.final_layernorm).__module__ == FluxNorm.__module__
    assert sbs.ours(model) == set(OURS[layers].split())


def test_grouped_experts_stay_transformer_engine_s(monkeypatch):
    calls = []
    theirs = types.SimpleNamespace(grouped_mlp_modules=lambda *args: calls.append(args) or "theirs")
    monkeypatch.setattr(provider, "TESpecProvider", lambda: theirs)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    flux = FluxSpecProvider()
    takes = len(inspect.signature(backends.LocalSpecProvider().grouped_mlp_modules).parameters)
    single, grouped = (False,) * takes, (True,) + (False,) * (takes - 1)  # to 0.16 two arguments

    def built() -> Any:
        experts = flux.grouped_mlp_modules(*single)
        return sbs.module_of(experts) if takes == 1 else experts[0]

    assert built() is SequentialMLP
    monkeypatch.setattr(transformer_engine, "HAVE_TE", True)
    assert flux.grouped_mlp_modules(*grouped) == "theirs"
    assert built() is SequentialMLP
    assert calls == [grouped]


def test_buffer_names_tell_the_layer():
    names = ["qkv", "q_proj", "q_up_proj", "kv_down_proj", "proj", "fc1", "mtp_eh_proj"]
    assert [layer_of(name) for name in names] == ["qkv"] * 4 + ["proj", "fc1", "mtp_eh_proj"]
    assert layer_of(None) is None


def spec_module(**arguments):
    """`flux_megatron.specs` as Megatron imports it, when it was given these arguments."""
    defaults = {
        "transformer_impl": "local", "mtp_num_layers": None, "num_experts": None, "spec": OUR_SPEC,
        "moe_layer_freq": 1, "moe_grouped_gemm": False, "qk_layernorm": True, "qk_l2_norm": False,
        "multi_latent_attention": False, "normalization": "RMSNorm",
    }  # fmt: skip
    training = types.ModuleType("megatron.training")
    training.get_args = lambda: types.SimpleNamespace(**{**defaults, **arguments})
    sys.modules["megatron.training"] = training
    sys.modules.pop("flux_megatron.specs", None)
    return importlib.import_module("flux_megatron.specs")


@sbs.on_tp_ranks(1)
def test_spec_is_made_of_ours_as_the_arguments_say(rank):
    spec = spec_module().flux_layer_spec
    parts = spec.submodules
    assert parts.self_attention.submodules.q_layernorm is parts.input_layernorm is FluxNorm
    assert sbs.ours(built(spec, qk_layernorm=True)) == sbs.ALL
    spec = spec_module(num_experts=2).flux_layer_spec
    more = {"num_moe_experts": 2, "add_bias_linear": False, "qk_layernorm": True}
    model = built(spec, **more)
    assert sbs.ours(model.decoder.layers[0].mlp.experts) == {"linear_fc1", "linear_fc2"}


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        ({"transformer_impl": "transformer_engine"}, "transformer_engine given, local expected"),
        ({"mtp_num_layers": 1}, "cannot combine it with --mtp-num-layers: use --flux-overlap"),
        ({"num_experts": 2, "moe_layer_freq": 2}, "dense and expert layers alternate"),
        ({"multi_latent_attention": True}, "--multi-latent-attention: it needs"),
    ],
)
@on_cpu_ranks(1)
def test_spec_refuses_what_it_cannot_say(rank, arguments, refusal):
    with pytest.raises(ValueError, match=refusal):
        spec_module(**arguments)


def test_one_tensor_parallel_rank_is_said_before_the_start(capsys, monkeypatch):
    """There is nothing to overlap, which strict mode refuses; experts may have something."""
    monkeypatch.setattr(requirements, "_logged", set())
    nothing = "tensor parallel size is 1, so no call has communication to overlap"
    args = parse("--flux-overlap", "--transformer-impl", "local")
    args.tensor_model_parallel_size = 1
    assert requirements.overlaps_nothing(args)
    assert not refusals(args, {})
    args.flux_strict = True
    assert nothing in [refusal.why for refusal in refusals(args, {})]
    args.flux_strict = None
    monkeypatch.setenv("FLUX_MEGATRON_STRICT", "1")
    assert nothing in [refusal.why for refusal in refusals(args, {})]
    args.tensor_model_parallel_size = 2
    assert not refusals(args, {})


# whether other communication shares the GPU

TWO_REPLICAS = {"world_size": 8, "tensor_model_parallel_size": 4}
INTERLEAVED = {"virtual_pipeline_model_parallel_size": 2}
TWO_STAGES = {"world_size": 8, "tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2}
REDUCED, GATHERED = {"overlap_grad_reduce": True}, {"overlap_param_gather": True}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, False),
        (TWO_REPLICAS, False),
        (TWO_REPLICAS | REDUCED, True),
        (TWO_REPLICAS | GATHERED, True),
        (TWO_REPLICAS | REDUCED | {"context_parallel_size": 2}, True),
        (TWO_REPLICAS | REDUCED | {"tensor_model_parallel_size": 8}, False),
        (TWO_STAGES | REDUCED, False),
        (TWO_STAGES | {"overlap_p2p_comm": True}, False),
        (TWO_STAGES | {"num_layers_per_virtual_pipeline_stage": 2}, True),
        (TWO_STAGES | {"num_virtual_stages_per_pipeline_rank": 2}, True),
        (TWO_STAGES | INTERLEAVED | {"overlap_p2p_comm": True}, True),
        (TWO_STAGES | INTERLEAVED | {"overlap_p2p_comm": False}, False),
        (TWO_REPLICAS | INTERLEAVED, False),
    ],
)  # fmt: skip
def test_overlapped_in(given, expected):
    assert overlapped_in(argparse.Namespace(**given)) is expected


def test_before_megatron_validates_its_arguments_torchrun_tells_the_ranks(monkeypatch):
    given = {**TWO_REPLICAS, **REDUCED, "world_size": None}
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert overlapped_in(argparse.Namespace(**given))
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert not overlapped_in(argparse.Namespace(**given))


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "met"), ({"dataloader_type": "cyclic"}, "met"), ({"dataloader_type": "external"}, "auto"),
     ({"variable_seq_lengths": True}, "auto"), ({"sft": True}, "auto"),
     ({"perform_rl_step": True}, "auto"), ({"hybrid_context_parallel": True}, "auto")],
)  # fmt: skip
@on_cpu_ranks(1)
def test_where_all_micro_batches_are_alike_ranges_are_raced_as_they_are_met(rank, given, expected):
    os.environ.pop("FLUX_MEGATRON_TUNE", None)
    args = parse("--flux-overlap")
    vars(args).update(given)
    install.install_from(args)
    assert settings.get().tune == expected


@pytest.mark.parametrize("wanted", [None, "met", "off", "on"])
@on_cpu_ranks(1)
def test_where_bits_are_to_be_the_same_nothing_is_raced(rank, wanted):
    """Of arguments that `--spec` has, as of a model's configuration."""
    os.environ.pop("FLUX_MEGATRON_TUNE", None)
    if wanted:
        os.environ["FLUX_MEGATRON_TUNE"] = wanted
    settings.reload()
    args = parse("--flux-overlap")
    args.deterministic_mode = True
    if wanted == "on":
        with pytest.raises(ValueError, match="FLUX_MEGATRON_TUNE=on given with deterministic_mode"):
            resolved.resolve(args)
        return
    resolved.resolve(args)
    assert settings.get().tune == "off"


@on_cpu_ranks(1)
def test_a_knob_for_the_same_bits_comes_before_the_variable(rank):
    os.environ["FLUX_MEGATRON_TUNE"] = "on"
    args = parse("--flux-overlap")
    args.deterministic_mode = True
    install.install_from(args)
    assert settings.get().tune == "off"


@pytest.mark.parametrize("wanted", ["auto", "on", "off"])
@on_cpu_ranks(1)
def test_a_knob_says_how_ranges_are_raced(rank, wanted):
    os.environ.pop("FLUX_MEGATRON_TUNE", None)
    install.install_from(parse("--flux-overlap", "--flux-tune", wanted))
    assert settings.get().tune == wanted


@on_cpu_ranks(1)
def test_a_variable_says_that_nothing_is_raced(rank):
    os.environ["FLUX_MEGATRON_TUNE"] = "off"
    install.install_from(parse("--flux-overlap"))
    assert settings.get().tune == "off"


@pytest.mark.parametrize(
    ("setting", "overlap", "expected"),
    [("", True, "1"), ("", False, "0"), ("auto", True, "1"), ("0", True, "0"), ("1", False, "1")],
)
@pytest.mark.parametrize("way", ["flag", "spec"])
@on_cpu_ranks(1)
def test_auto_is_what_the_arguments_say(rank, setting, overlap, expected, way):
    os.environ.pop("FLUX_MEGATRON_BESIDE", None)
    if setting:
        os.environ["FLUX_MEGATRON_BESIDE"] = setting
    more = TWO_REPLICAS | {"overlap_grad_reduce": overlap}
    if way == "spec":
        spec_module(**more)
    else:
        args = parse("--flux-overlap")
        vars(args).update(more)
        install.install_from(args)
        install.install_from(args)  # Megatron parses its arguments more than once
    assert settings.get().beside == expected
