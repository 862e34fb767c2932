"""GPTModel with megatron-core's data parallelism and optimizer: ours, stock, one rank alone."""

from __future__ import annotations

import pytest
from ranks import run_ranks
from training_cases import FUSION, TIED
from training_run import Feature, Training

import flux_megatron


def _train(rank: int, layers: str, feature: Feature):
    """Losses of a few steps, and what ran how often."""
    training = Training(feature, layers)
    flux_megatron.reset_report()
    return training.run(feature.steps), flux_megatron.report()


@pytest.mark.parametrize(("world_size", "more"), [(2, {}), (4, TIED)], ids=["2", "4, tied"])
def test_losses_are_stocks_and_every_call_is_overlapped(world_size, more):
    feature = Feature(
        tp=world_size, model=more, ddp={"overlap_grad_reduce": True}, microbatches=2,
        config={"qk_layernorm": True, "layernorm_zero_centered_gamma": True, **FUSION},
    )  # fmt: skip
    (losses, report), *others = run_ranks(_train, world_size, "flux", feature)
    assert all(other == losses for other, _ in others)
    assert losses[-1] < losses[0]
    plain = Feature(model=more, config=feature.config | {"gradient_accumulation_fusion": False},
                    microbatches=2, tp=1)  # fmt: skip
    ((alone, _),) = run_ranks(_train, 1, "stock", plain)
    assert max(abs(a - b) for a, b in zip(losses, alone, strict=True)) <= 1e-5
    # forward: qkv and fc1 gather, proj and fc2 scatter, the LM head gathers; backward the reverse
    expected = (4 * 2 + 1) * feature.steps * feature.microbatches
    assert report.calls == {("ag_gemm", "fused"): expected, ("gemm_rs", "fused"): expected}
    assert not report.fallbacks
