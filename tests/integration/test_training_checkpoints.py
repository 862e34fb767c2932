"""Distributed checkpoints: what our layers saved stock ones load, and the reverse, over other ranks
too; training goes on as if nothing had happened.

The quick part is tested always, all of it with FLUX_MEGATRON_ALL_FEATURES=1.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("pydantic", reason="needs the extra `train`")
pytest.importorskip("psutil", reason="without it Megatron waits for writers that died")

import torch
from training_cases import ALL, FOUR_LAYERS, LLAMA, OVERLAP, TIED
from training_checkpoints import Move, difference
from training_run import Feature

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
