"""Specifications: what a GPT is built from on which stage, and that nothing else is touched."""

from __future__ import annotations

import contextlib

import pytest
import side_by_side as sbs
import torch
from megatron.core import tensor_parallel
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs, gpt_model
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.torch_norm import L2Norm
from ranks import on_cpu_ranks

from flux_megatron.integration import stand_ins
from flux_megatron.integration.attention import FluxCoreAttention
from flux_megatron.integration.norm import FluxNorm
from flux_megatron.integration.provider import FluxSpecProvider, StockSpecProvider
from flux_megatron.integration.specs import use_flux_output_layer
from flux_megatron.lab.train.specs import gpt_block_spec, local_spec_from

CLASSES = {
    "flux": (stand_ins.ColumnParallelLinear, stand_ins.RowParallelLinear),
    "stock": (ColumnParallelLinear, RowParallelLinear),
}


def config(**more):
    return sbs.settings(1, False, torch.float32, **{"num_layers": 4, "ffn_hidden_size": 32, **more})


def layer_spec(layers="flux", **options):
    """Megatron's own of one layer."""
    with local_spec_from(layers):
        return gpt_layer_specs.get_gpt_layer_local_spec(**options)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("layers", ["flux", "stock"])
def test_layers_and_norms(layers, normalization):
    column, row = CLASSES[layers]
    parts = layer_spec(layers, normalization=normalization, qk_layernorm=True).submodules
    attention, mlp = sbs.submodules_of(parts.self_attention), sbs.submodules_of(parts.mlp)
    assert (attention.linear_qkv, attention.linear_proj) == (column, row)
    assert (mlp.linear_fc1, mlp.linear_fc2) == (column, row)
    norms = {parts.input_layernorm, parts.pre_mlp_layernorm, attention.q_layernorm}
    assert norms == {FluxNorm}


@sbs.on_tp_ranks(1)
def test_norms_of_queries_are_those_of_the_configuration(rank):
    given = config(qk_layernorm=True)
    for wanted in (False, True):
        given.qk_l2_norm = wanted  # before 0.16 no field
        specs = [gpt_block_spec(given, layers).layer_specs[0] for layers in CLASSES]
        for spec in specs:
            attention = sbs.submodules_of(spec.submodules.self_attention)
            norms = {attention.q_layernorm, attention.k_layernorm}
            assert norms == {L2Norm if wanted else FluxNorm}


def test_unknown_layers_are_refused():
    with pytest.raises(ValueError, match=r"layers is 'te', one of \['flux', 'stock'\] expected"):
        layer_spec("te")


def test_nothing_stays_replaced():
    with contextlib.suppress(ZeroDivisionError), use_flux_output_layer():
        assert gpt_model.tensor_parallel.ColumnParallelLinear is stand_ins.ColumnParallelLinear
        assert gpt_model.tensor_parallel.layers is tensor_parallel.layers
        assert tensor_parallel.ColumnParallelLinear is ColumnParallelLinear
        raise ZeroDivisionError
    layer_spec()
    assert gpt_model.tensor_parallel is tensor_parallel
    assert tensor_parallel.layers.ColumnParallelLinear is ColumnParallelLinear
    assert gpt_layer_specs.LocalSpecProvider is LocalSpecProvider


def test_providers_answer_megatron_s_questions():
    flux, stock = FluxSpecProvider(), StockSpecProvider()
    assert isinstance(flux, LocalSpecProvider)
    assert not flux.fuse_layernorm_and_linear()
    assert flux.layer_norm(rms_norm=True, for_qk=True) is stock.layer_norm() is FluxNorm
    assert flux.core_attention() is stock.core_attention() is FluxCoreAttention
    assert stock.column_parallel_linear() is ColumnParallelLinear


@pytest.mark.parametrize(
    ("more", "built"),
    [
        ({}, [4, 4]),
        ({"num_layers_in_first_pipeline_stage": 3}, [3, 1]),
        ({"virtual_pipeline_model_parallel_size": 2}, [2, 2]),
    ],
)
@on_cpu_ranks(2)
def test_block_holds_the_layers_of_its_stage(rank, more, built):
    stages = 1 if not more else 2
    more = more and {**more, "pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
    virtual = more.get("virtual_pipeline_model_parallel_size")
    sbs.start(1, pipeline_model_parallel_size=stages, virtual_pipeline_model_parallel_size=virtual)
    settings = config(**more)
    chunks = [gpt_block_spec(settings, vp_stage=stage) for stage in range(virtual or 1)]
    assert all(chunk.layer_norm is FluxNorm for chunk in chunks)
    if virtual:
        assert [len(chunk.layer_specs) for chunk in chunks] == [1, 1]
    assert sum(len(chunk.layer_specs) for chunk in chunks) == built[rank]
