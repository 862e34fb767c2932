"""In a launch with TransformerEngine's layers nothing but the classes of linear layers differs from
stock: names, order, shapes and tags of parameters are the same, and what a checkpoint holds.

TransformerEngine is not here. Its layers are stand-ins, which are held against its source below.
"""

from __future__ import annotations

from typing import Any

import pytest
import side_by_side as sbs
import te_stand_ins as te
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from ranks import on_cpu_ranks, run_ranks

from flux_megatron.integration import stand_ins
from flux_megatron.integration.layers import FluxColumnParallelLinear, FluxRowParallelLinear

# Read in TransformerEngine v2.11, pytorch/module/layernorm_linear.py and linear.py: what their
# constructors register, in this order, and how reset_parameters tags it (v1.7 to v2.18 do the
# same). Then `_extra_state`, in pytorch/module/base.py.
SHARDED = {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}
SHARED = {"sequence_parallel": True}
READ = {
    "TELayerNormColumnParallelLinear": {
        "layer_norm_weight": SHARED, "layer_norm_bias": SHARED, "weight": SHARDED, "bias": SHARDED,
    },
    "TEColumnParallelLinear": {"weight": SHARDED, "bias": SHARDED},
    "TERowParallelLinear": {"weight": {**SHARDED, "partition_dim": 1}, "bias": SHARED},
}  # fmt: skip
# what megatron-core takes a parameter without the tag for
UNTAGGED = {
    "tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1,
    "sequence_parallel": False, "allreduce": True,
}  # fmt: skip
CLASSES = {
    te.TELayerNormColumnParallelLinear: stand_ins.TELayerNormColumnParallelLinear,
    te.TEColumnParallelLinear: stand_ins.TEColumnParallelLinear,
    te.TERowParallelLinear: stand_ins.TERowParallelLinear,
    ColumnParallelLinear: stand_ins.ColumnParallelLinear,  # the LM head
}
LLAMA = {
    "normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu,
    "add_bias_linear": False, "num_query_groups": 2,
}  # fmt: skip
MOE = {
    "num_moe_experts": 2, "moe_layer_freq": [0, 1], "add_bias_linear": False,
    "moe_shared_expert_intermediate_size": 16,
}  # fmt: skip
PIPELINE = {"pipeline_model_parallel_size": 2}
INTERLEAVED = {**PIPELINE, "virtual_pipeline_model_parallel_size": 2, "num_layers": 4}
TIED = {"tied": True}
MODELS: dict[str, dict[str, Any]] = {
    "LayerNorm, biases": {},
    "zero-centered gamma": {"layernorm_zero_centered_gamma": True},
    "GQA, SwiGLU, RMSNorm": LLAMA,
    "tied": {**LLAMA, **TIED},
    "q/k norm": {**LLAMA, "qk_layernorm": True},
    "q/k L2 norm": {**LLAMA, "qk_l2_norm": True},
    "MoE, shared experts": MOE,
    "multi-token prediction": {**LLAMA, "mtp_num_layers": 1},
    "MoE, multi-token prediction": {**MOE, "mtp_num_layers": 1},
    "bf16": {**LLAMA, "params_dtype": torch.bfloat16, "bf16": True},
    "pipeline": {**LLAMA, **PIPELINE},
    "pipeline, tied": {**PIPELINE, **TIED},
    "pipeline, multi-token prediction": {**LLAMA, **PIPELINE, "mtp_num_layers": 1},
    "interleaved": {**LLAMA, **INTERLEAVED},
    "interleaved, tied": {**INTERLEAVED, **TIED},
}


def chunks(options: dict[str, Any], use_te: bool, alike: bool = False) -> list[GPTModel]:
    """This rank's models, as Megatron specifies them now; `alike`: by a single layer."""
    options = {"num_layers": 2, **options}
    tied = options.pop("tied", False)
    l2_norm = {"qk_l2_norm": options.pop("qk_l2_norm", False)}
    if "qk_l2_norm" in TransformerConfig.__dataclass_fields__:  # from 0.16 on
        options |= l2_norm
    config = sbs.settings(2, True, torch.float32, **options)
    stages = config.virtual_pipeline_model_parallel_size
    return [
        _chunk(config, use_te, alike, l2_norm, vp_stage, tied)
        for vp_stage in (range(stages) if stages else [None])
    ]


def _chunk(
    config: Any, use_te: bool, alike: bool, l2_norm: dict[str, bool], vp_stage: Any, tied: bool
) -> GPTModel:
    sbs.seed()
    if alike and use_te:
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            qk_layernorm=config.qk_layernorm, **l2_norm
        )
    elif alike:
        spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization=config.normalization)
    else:
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(
            config, use_te, config.normalization, **l2_norm, vp_stage=vp_stage
        )
    mtp = None
    if config.mtp_num_layers:
        mtp = gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, use_te, vp_stage=vp_stage)
    place = {"ignore_virtual": False, "vp_stage": vp_stage}
    return GPTModel(
        config=config, transformer_layer_spec=spec, mtp_block_spec=mtp, vocab_size=16,
        max_sequence_length=8, share_embeddings_and_output_weights=tied, vp_stage=vp_stage,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
    )  # fmt: skip


def start(options: dict[str, Any]) -> None:
    """TP 2 and as many stages as these options ask for, with TransformerEngine."""
    names = ("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size")
    sbs.start(2, **{name: options[name] for name in names if name in options})
    te.pretend_te()


@pytest.mark.parametrize("name", MODELS)
def test_only_the_classes_of_linear_layers_differ(name):
    run_ranks(_compare, 2 * MODELS[name].get("pipeline_model_parallel_size", 1), MODELS[name])


def _compare(rank: int, options: dict[str, Any]) -> None:
    start(options)
    alike = not options.get("num_moe_experts") and "mtp_num_layers" not in options
    ways = [False, True] if alike and "pipeline_model_parallel_size" not in options else [False]
    stock = [model for way in ways for model in chunks(options, True, way)]
    assert te.overlap()
    ours = [model for way in ways for model in chunks(options, True, way)]
    for theirs, own in zip(stock, ours, strict=True):
        assert classes(theirs, CLASSES) == classes(own, {})
        assert parameters(theirs) == parameters(own)
        assert [*theirs.state_dict()] == [*own.state_dict()]
        assert sharded(theirs) == sharded(own)
        sbs.assert_same([*own.parameters()], [*theirs.parameters()])


@on_cpu_ranks(2)
def test_layers_that_nobody_initialises_have_the_tags_of_transformer_engine_s(rank):
    """By them norms of gradients count the shards of all ranks."""
    options = {"perform_initialization": False}
    start(options)
    (stock,) = chunks(options, True)
    assert te.overlap()
    (model,) = chunks(options, True)
    head = "output_layer.weight"  # megatron-core's own, which has them from 0.18 on
    of_stock, of_ours = (
        {name: tags(one) for name, one in each.named_parameters()} for each in (stock, model)
    )
    split = {"tensor_model_parallel": True, "partition_dim": 0}
    assert of_ours.pop(head) == of_stock.pop(head) | split
    assert of_ours == of_stock
    biases = [one for name, one in model.named_parameters() if name.endswith("linear_fc1.bias")]
    assert biases
    assert not any(one.any() for one in biases)


def classes(model: GPTModel, ours: dict[type, type]) -> list[tuple[str, type]]:
    """Every module in order, with its class; what is in an expert stays as it is."""
    return [
        (name, type(module) if ".local_experts." in name else ours.get(type(module), type(module)))
        for name, module in model.named_modules()
    ]


def parameters(model: GPTModel) -> list[tuple]:
    """In the order in which optimizers and gradient buffers number them."""
    return [
        (name, parameter.shape, parameter.dtype, parameter.requires_grad, tags(parameter))
        for name, parameter in model.named_parameters()
    ]


def tags(parameter: torch.nn.Parameter) -> dict[str, Any]:
    """Everything that others could read, with what they take for granted."""
    return {**UNTAGGED, **vars(parameter)}


def sharded(model: GPTModel) -> list[tuple]:
    """What a distributed checkpoint holds of it, and where."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = model.sharded_state_dict(metadata={"dp_cp_group": group})
    apply_factories(state)
    return [
        (type(part), part.key, part.global_shape, part.global_offset, part.replica_id)
        for part in nested_values(state)
    ]


@pytest.mark.parametrize("name", READ)
@on_cpu_ranks(2)
def test_layers_have_what_transformer_engine_s_source_says(rank, name):
    start({})
    config = sbs.settings(2, True, torch.float32)
    options = {
        "bias": True, "skip_bias_add": True, "is_expert": False,
        "init_method": torch.nn.init.ones_,
    }  # fmt: skip
    options |= {"input_is_parallel": True} if "Row" in name else {"gather_output": False}
    stand_in = te.STAND_INS[name]
    for layer in (stand_in, CLASSES[stand_in]):
        built = build_module(layer, 8, 12, config=config, **options)
        found = {name: tags(parameter) for name, parameter in built.named_parameters()}
        assert list(found) == list(READ[name])
        assert found == {name: {**UNTAGGED, **read} for name, read in READ[name].items()}
        assert [*built.state_dict()] == [*READ[name], "_extra_state"]


ONE_RANK = {"tensor_model_parallel_size": 1, "sequence_parallel": False}
LOCAL = {
    "LayerNorm": {},
    "RMSNorm, qk": {"normalization": "RMSNorm", "qk_layernorm": True},
    "MTP": {"normalization": "RMSNorm", "mtp_num_layers": 1},
    "experts": {"num_moe_experts": 2, "moe_layer_freq": [0, 1], "mtp_num_layers": 1,
                "add_bias_linear": False},
}  # fmt: skip


@pytest.mark.parametrize("name", LOCAL)
@pytest.mark.parametrize("installed", [True, False])
def test_keys_are_those_of_local_layers(name, installed):
    """In checkpoints; also of the norms, which save an `_extra_state` where TransformerEngine's
    do: the final norm of layers that are all alike, where it is installed.
    """
    sbs.skip_where_mtp_needs_te(LOCAL[name])
    run_ranks(_keys_of_local, 1, LOCAL[name], installed)


def _keys_of_local(rank: int, options: dict[str, Any], installed: bool) -> None:
    sbs.start(1)
    stock = _keys(options)
    if installed:
        te.pretend_te()
        of_one_layer = _keys({}, alike=True)
    assert not te.overlap(transformer_impl="local" if installed else "transformer_engine")
    assert _keys(options) == stock
    assert not {key for key in stock if key.endswith("norm._extra_state")}
    if installed:
        assert _keys({}, alike=True) == of_one_layer
        states = {key for key in of_one_layer if key.endswith("norm._extra_state")}
        assert states == {"decoder.final_layernorm._extra_state"}


def _keys(options: dict[str, Any], alike: bool = False) -> set[str]:
    (model,) = chunks({**options, **ONE_RANK}, False, alike)
    return {part.key for part in model.sharded_state_dict().values()}


CHOSEN = {
    ("qkv", "fc2"): "linear_qkv linear_fc2",
    ("proj",): "linear_proj",
    ("fc1", "head"): "linear_fc1 output_layer",
}


@pytest.mark.parametrize("layers", CHOSEN)
@on_cpu_ranks(2)
def test_layers_that_were_not_chosen_are_transformer_engine_s(rank, layers):
    start({})
    (stock,) = chunks({}, True)
    assert te.overlap("--flux-layers", *layers)
    (model,) = chunks({}, True)
    assert parameters(stock) == parameters(model)
    assert sbs.ours(model) == set(CHOSEN[layers].split())


# of its projections those to latents are whole on every rank, and communicate nothing
LATENT = {
    "linear_q_proj": FluxColumnParallelLinear,
    "linear_q_down_proj": te.TELinear,
    "linear_kv_down_proj": te.TELinear,
    "linear_q_up_proj": FluxColumnParallelLinear,
    "linear_kv_up_proj": FluxColumnParallelLinear,
    "linear_proj": FluxRowParallelLinear,
}


@pytest.mark.parametrize("layers", [(), ("proj", "fc1", "fc2"), ("qkv",)])
@pytest.mark.parametrize("more", [{}, {"q_lora_rank": None}, {"qk_layernorm": False}])
@on_cpu_ranks(2)
def test_latent_attention_follows_stock(rank, more, layers):
    start({})
    stock = _latent_model(**more)
    assert te.overlap(*(("--flux-layers", *layers) if layers else ()))
    ours = _latent_model(**more)
    assert parameters(stock) == parameters(ours)
    assert sharded(stock) == sharded(ours)
    attention, theirs = (model.decoder.layers[0].self_attention for model in (ours, stock))
    for name, kind in LATENT.items():
        built = getattr(attention, name, None)
        chosen = not layers or ("proj" if name == "linear_proj" else "qkv") in layers
        expected = kind if chosen else type(getattr(theirs, name, None))
        assert built is None or isinstance(built, expected), name
    (loss, *gradients), (right, *expected) = sbs.one_step(ours), sbs.one_step(stock)
    torch.testing.assert_close(loss, right, atol=1e-6, rtol=0)
    torch.testing.assert_close(gradients, expected, atol=1e-6, rtol=1e-5)


def _latent_model(**more: Any) -> GPTModel:
    sbs.seed()
    given = {"q_lora_rank": 8, "qk_layernorm": True, **more}
    config = MLATransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, normalization="RMSNorm",
        kv_lora_rank=8, qk_head_dim=4, qk_pos_emb_head_dim=4, v_head_dim=4,
        tensor_model_parallel_size=2, sequence_parallel=True, use_cpu_initialization=True,
        add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0, rope_type="rope",
        multi_latent_attention=True, apply_rope_fusion=False, **given,
    )  # fmt: skip
    spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
        qk_layernorm=config.qk_layernorm, multi_latent_attention=True
    )
    return GPTModel(config, spec, 16, 8, position_embedding_type="rope")
