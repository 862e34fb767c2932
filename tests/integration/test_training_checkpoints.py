"""Distributed checkpoints: what our layers saved stock ones load, and the reverse, over other ranks
too; training goes on as if nothing had happened.

The quick part is tested always, all of it with FLUX_MEGATRON_ALL_FEATURES=1. Then come layers of
TransformerEngine, which is not here (te_stand_ins.py), in every format of Megatron: the distributed
optimizer's state has places there, not names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("pydantic", reason="needs the extra `train`")
pytest.importorskip("psutil", reason="without it Megatron waits for writers that died")

import numpy
import te_stand_ins as te
import torch
from megatron.core.models.gpt import gpt_layer_specs
from spec_shapes import skip_before
from training_cases import ALL, FOUR_LAYERS, FUSION, LLAMA, OVERLAP, TIED, ZERO
from training_checkpoints import LEGACY, Move, Side, difference
from training_run import Feature, Training

from flux_megatron.integration.apex_shim import provide_wgrad_kernels
from flux_megatron.integration.norm_linear import FluxLayerNormColumnParallelLinear
from flux_megatron.versions.megatron_core import MEGATRON_CORE

TOLERANCE = 1e-5  # docs/tests.md

TWO = Feature(config=LLAMA)
STAGES = Feature(config=LLAMA, pp=2, microbatches=2)
FOUR = Feature(config=LLAMA, tp=4, microbatches=2)
SHARDED = Feature(config=LLAMA, dp=2, ddp=OVERLAP)
FOUR_SHARDED = replace(FOUR, ddp=OVERLAP)
INTERLEAVED = Feature(config=FOUR_LAYERS, model=TIED, pp=2, vp=2, microbatches=2)
BF16 = Feature(config=LLAMA, dtype=torch.bfloat16)
MOVES = {
    "flux to stock": Move(("flux", TWO), ("stock", TWO), quick=True),
    "stock to flux": Move(("stock", TWO), ("flux", TWO)),
    "asynchronous, stock to flux": Move(("stock", TWO), ("flux", TWO), at_once=False, quick=True),
    "asynchronous, flux to stock": Move(("flux", TWO), ("stock", TWO), at_once=False),
    "TP 2 x PP 2 to TP 4": Move(("flux", STAGES), ("stock", FOUR), quick=True),
    "TP 4 to TP 2 x PP 2": Move(("stock", FOUR), ("flux", STAGES), quick=True),
    "TP 2 x DP 2 to TP 4": Move(("stock", SHARDED), ("flux", FOUR_SHARDED)),
    "TP 4 to TP 2 x DP 2": Move(("flux", FOUR_SHARDED), ("stock", SHARDED), at_once=False),
    "distributed optimizer": Move(
        ("flux", SHARDED), ("stock", SHARDED), sharding="dp_reshardable"
    ),
    "interleaved stages": Move(("flux", INTERLEAVED), ("stock", INTERLEAVED)),
    "bf16, flux to stock": Move(("flux", BF16), ("stock", BF16)),
    "bf16, stock to flux": Move(("stock", BF16), ("flux", BF16)),
}  # fmt: skip


@pytest.mark.parametrize("name", [n for n, move in MOVES.items() if ALL or move.quick])
def test_training_goes_on(name, tmp_path):
    move = MOVES[name]
    apart = difference(move, str(tmp_path))
    # in bf16 other layers round otherwise; that what they start from is the same was seen
    assert apart <= (1e-2 if move.source[1].low_precision else TOLERANCE)


def test_a_lost_state_is_seen(tmp_path):
    move = Move(("stock", TWO), ("stock", TWO))
    assert difference(move, str(tmp_path), forget="exp_avg") > TOLERANCE


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


FUSED = Feature(config={**LLAMA, **FUSION}, dp=2, ddp=OVERLAP)
BIASES = Feature(config={"qk_layernorm": True}, dp=2, ddp=ZERO)
FUSED_FOUR = replace(FUSED, tp=4, dp=1, microbatches=2)
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
def test_training_of_te_goes_on(source, target, sharding, tmp_path):
    assert apart((source, FUSED), (target, FUSED), sharding, tmp_path) <= TOLERANCE


@pytest.mark.parametrize(("source", "target"), BOTH_WAYS)
def test_training_of_te_goes_on_with_biases_and_norms_of_queries(source, target, tmp_path):
    skip_before("0.16", "they save nothing by place with torch's Adam")
    assert apart((source, BIASES), (target, BIASES), BY_PLACE, tmp_path) <= TOLERANCE


@pytest.mark.parametrize("sharding", ANY_RANKS)
@pytest.mark.parametrize(("source", "target"), BOTH_WAYS)
def test_training_of_te_goes_on_on_more_ranks(source, target, sharding, tmp_path):
    assert apart((source, FUSED), (target, FUSED_FOUR), sharding, tmp_path) <= TOLERANCE
