"""Checkpoints of TransformerEngine's layers with the distributed optimizer, whose state has places,
not names: saved by stock layers and loaded by ours, and the reverse, in every format of Megatron.

TransformerEngine is not here: te_stand_ins.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("pydantic", reason="needs the extra `train`")
pytest.importorskip("psutil", reason="without it Megatron waits for writers that died")


import numpy
import te_stand_ins as te
from megatron.core.models.gpt import gpt_layer_specs
from spec_shapes import skip_before
from training_cases import FUSION, LLAMA, OVERLAP, ZERO
from training_checkpoints import LEGACY, Move, Side, difference
from training_run import Feature, Training

from flux_megatron.integration.apex_shim import provide_wgrad_kernels
from flux_megatron.integration.norm_linear import FluxLayerNormColumnParallelLinear
from flux_megatron.versions.megatron_core import MEGATRON_CORE

TOLERANCE = 1e-5  # docs/tests.md


class TrainingOfTE(Training):
    """`layers`: stock, or flux as `--flux-overlap` puts them into a launch."""

    def __init__(self, feature: Feature, layers: str) -> None:
        te.pretend_te()
        provide_wgrad_kernels()  # stock has apex's
        self.use_te = te.overlap() if layers == "flux" else True
        super().__init__(feature, layers)
        linear = type(self.modules[0].decoder.layers[0].mlp.linear_fc1)
        ours = FluxLayerNormColumnParallelLinear
        assert linear is (ours if layers == "flux" else te.TELayerNormColumnParallelLinear)

    def specifications(self, vp_stage: int | None) -> tuple[Any, Any]:
        config = self.config
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(
            config, self.use_te, config.normalization, vp_stage=vp_stage
        )
        return spec, gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, self.use_te, vp_stage)


TWO = Feature(config={**LLAMA, **FUSION}, dp=2, ddp=OVERLAP)
BIASES = Feature(config={"qk_layernorm": True}, dp=2, ddp=ZERO)
FOUR = replace(TWO, tp=4, dp=1, microbatches=2)
# Of the optimizer's state: by place, and by parameter. Before 0.16 stock layers save none by place
# with torch's Adam, whose steps are tensors; the last format, which only they write, takes NumPy 1.
BY_PLACE = "dp_reshardable"
ANY_RANKS = ["fully_reshardable"] if MEGATRON_CORE.since("0.15") else []
if hasattr(numpy, "product") and not MEGATRON_CORE.since("0.16"):
    ANY_RANKS += ["fully_sharded_model_space"]
FORMATS = [*([BY_PLACE] if MEGATRON_CORE.since("0.16") else []), LEGACY, *ANY_RANKS]
BOTH_WAYS = (("stock", "flux"), ("flux", "stock"))


def apart(source: Side, target: Side, sharding: str, folder: Any) -> float:
    move = Move(source, target, sharding=sharding, training=TrainingOfTE)
    return difference(move, str(folder))


@pytest.mark.parametrize("sharding", FORMATS)
@pytest.mark.parametrize(("source", "target"), BOTH_WAYS)
def test_training_goes_on(source, target, sharding, tmp_path):
    assert apart((source, TWO), (target, TWO), sharding, tmp_path) <= TOLERANCE


@pytest.mark.parametrize(("source", "target"), BOTH_WAYS)
def test_training_goes_on_with_biases_and_norms_of_queries(source, target, tmp_path):
    skip_before("0.16", "they save nothing by place with torch's Adam")
    assert apart((source, BIASES), (target, BIASES), BY_PLACE, tmp_path) <= TOLERANCE


@pytest.mark.parametrize("sharding", ANY_RANKS)
@pytest.mark.parametrize(("source", "target"), BOTH_WAYS)
def test_training_goes_on_on_more_ranks(source, target, sharding, tmp_path):
    assert apart((source, TWO), (target, FOUR), sharding, tmp_path) <= TOLERANCE
