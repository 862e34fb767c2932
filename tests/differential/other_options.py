"""Options that ought not to matter to our layers, where silent faults would hide; and a few that we
refuse. Of those that need no files, no other packages, no GPU and no service.
"""

from __future__ import annotations

from typing import Any

from drawing import Hand

HARMLESS = (
    "--allow-ambiguous-pad-tokens", "--batch-invariant-mode", "--check-for-large-grads",
    "--check-for-spiky-loss", "--ddp-pad-buckets-for-high-nccl-busbw",
    "--ddp-reduce-scatter-with-fp32-accumulation", "--disable-align-grad-reduce",
    "--disable-async-tensor-model-parallel-allreduce", "--disable-bf16-reduced-precision-matmul",
    "--disable-clone-scatter-output-in-embedding", "--disable-jit-fuser",
    "--disable-manual-gc-eval", "--disable-symmetric-registration", "--enable-experimental",
    "--enable-mhc-connections", "--freeze-all-layers", "--fused-residual-rmsnorm",
    "--log-memory-to-tensorboard", "--log-num-zeros-in-grad", "--log-throughput",
    "--log-timers-to-tensorboard", "--log-validation-ppl-to-tensorboard",
    "--log-world-size-to-tensorboard", "--manual-gc", "--mtp-use-repeated-layer",
    "--no-async-tensor-model-parallel-allreduce", "--no-barrier-with-level-1-timing",
    "--no-check-for-nan-in-loss-and-grad", "--no-data-sharding",
    "--no-log-loss-scale-to-tensorboard", "--no-mmap-bin-files", "--no-one-logger",
    "--no-persist-layer-norm", "--no-scatter-gather-tensors-in-pipeline",
    "--no-use-layer-wise-param-layout", "--openai-gelu", "--te-rng-tracker", "--tp-comm-overlap",
    "--use-flash-attn", "--use-mcore-models", "--use-rotary-position-embeddings",
    "--use-same-sampling-seed-across-dp-ranks", "--use-te-activation-func",
    "--use-tp-pp-dp-mapping", "--verify-integrity",
)  # fmt: skip
WITH_VALUES: dict[str, tuple[Any, ...]] = {
    "--adam-beta1": (0.8,), "--check-weight-hash-across-dp-replicas-interval": (2,),
    "--empty-unused-memory-level": (0, 1, 2), "--fp8-format": ("e4m3",),
    "--head-lr-mult": (0.5,), "--hysteresis": (1, 3),
    "--iterations-to-skip": (2,), "--logging-level": (40,), "--log-memory-interval": (2,),
    "--loss-scale-window": (2,), "--lr-warmup-init": (1e-5,), "--manual-gc-interval": (2,),
    "--mid-level-dataset-surplus": (0.1,), "--mlp-chunks-for-training": (2,),
    "--num-dataset-builder-threads": (2,),
    "--rerun-mode": ("disabled", "validate_results"),
    "--timing-log-level": (0, 1, 2), "--timing-log-option": ("max", "minmax", "all"),
    "--train-sync-interval": (2,), "--exit-duration-in-mins": (60,),
    "--cuda-graph-impl": ("none", "transformer_engine"), "--output-logit-dtype": ("fp32",),
}  # fmt: skip


def draw(hand: Hand) -> None:
    among = candidates(hand)
    for option in hand.rng.sample(among, hand.one({0: 4, 1: 4, 2: 2, 3: 1})):
        values = WITH_VALUES.get(option, ())
        hand.give(option, *([hand.rng.choice(values)] if values else []))


def candidates(hand: Hand) -> list[str]:
    """Those that this release has."""
    return [option for option in (*HARMLESS, *WITH_VALUES) if hand.knows(option)]
