"""Specifications: what a GPT is built from on which stage."""

from __future__ import annotations

import pytest
import side_by_side as sbs
import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.torch_norm import L2Norm
from ranks import on_cpu_ranks

from flux_megatron.integration import stand_ins
from flux_megatron.integration.attention import FluxCoreAttention
from flux_megatron.integration.norm import FluxNorm
from flux_megatron.integration.provider import FluxSpecProvider, StockSpecProvider
from flux_megatron.lab.train.specs import gpt_block_spec, local_spec


def config(**more):
    return sbs.settings(1, False, torch.float32, **{"num_layers": 4, "ffn_hidden_size": 32, **more})


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_norms(normalization):
    with local_spec():
        spec = gpt_layer_specs.get_gpt_layer_local_spec(
            normalization=normalization, qk_layernorm=True
        )
    parts = spec.submodules
    attention = sbs.submodules_of(parts.self_attention)
    norms = {parts.input_layernorm, parts.pre_mlp_layernorm, attention.q_layernorm}
    assert norms == {FluxNorm}
    assert gpt_layer_specs.LocalSpecProvider is LocalSpecProvider


@sbs.on_tp_ranks(1)
def test_norms_of_queries_are_those_of_the_configuration(rank):
    given = config(qk_layernorm=True)
    for wanted in (False, True):
        given.qk_l2_norm = wanted  # before 0.16 no field
        spec = gpt_block_spec(given).layer_specs[0]
        attention = sbs.submodules_of(spec.submodules.self_attention)
        norms = {attention.q_layernorm, attention.k_layernorm}
        assert norms == {L2Norm if wanted else FluxNorm}


def test_providers_answer_megatron_s_questions():
    flux, stock = FluxSpecProvider(), StockSpecProvider()
    assert isinstance(flux, LocalSpecProvider)
    assert not flux.fuse_layernorm_and_linear()
    assert flux.layer_norm(rms_norm=True, for_qk=True) is stock.layer_norm() is FluxNorm
    assert flux.core_attention() is stock.core_attention() is FluxCoreAttention
    classes = stand_ins.ColumnParallelLinear, stand_ins.RowParallelLinear
    assert (flux.column_parallel_linear(), flux.row_parallel_linear()) == classes
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
