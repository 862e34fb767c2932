"""How ranks share the work, and the model: sizes, attention, positions, experts."""

from __future__ import annotations

from drawing import Hand

#         TP PP DP
LAYOUTS = {
    (2, 1, 1): 45, (2, 1, 2): 16, (2, 2, 1): 18, (4, 1, 1): 12,
    (1, 1, 1): 1, (1, 1, 2): 3, (1, 2, 1): 3, (1, 2, 2): 2,
}  # fmt: skip
HEADS = 8
BALANCE = {"aux_loss": 4, "seq_aux_loss": 2, "global_aux_loss": 1, "none": 1, "sinkhorn": 1}


def draw(hand: Hand) -> None:
    _parallel(hand)
    _sizes(hand)
    _pipeline(hand)
    _attention(hand)
    _positions(hand)
    _mlp(hand)
    if hand.chance(0.2):
        _experts(hand)
    predicts = hand.has("rope") and not hand.facts["experts"]
    if predicts and hand.perhaps(0.1, "--mtp-num-layers", 1):
        hand.perhaps(0.5, "--mtp-loss-scaling-factor", 0.1, 0.5)
    _variants(hand)


def _parallel(hand: Hand) -> None:
    tp, pp, dp = hand.one(LAYOUTS)
    sp = tp > 1 and hand.chance(0.85)
    hand.facts |= {"tp": tp, "pp": pp, "dp": dp, "sp": sp, "experts": False}
    hand.facts["te"] = hand.chance(0.4)
    hand.give("--transformer-impl", "transformer_engine" if hand.facts["te"] else "local")
    hand.give("--tensor-model-parallel-size", tp)
    hand.give("--pipeline-model-parallel-size", pp)
    if sp:
        hand.give("--sequence-parallel")


def _sizes(hand: Hand) -> None:
    pp = hand.facts["pp"]
    hand.facts["layers"] = layers = hand.one({2: 4, 4: 3} if pp == 2 else {1: 4, 2: 5, 3: 1})
    hand.facts["sequence"] = sequence = hand.one({16: 5, 32: 2, 24: 1})
    hand.give("--num-layers", layers)
    hand.give("--hidden-size", 64)
    hand.give("--num-attention-heads", HEADS)
    hand.give("--seq-length", sequence)
    hand.give("--max-position-embeddings", sequence)
    hand.give("--vocab-size", hand.one({60: 4, 120: 2, 150: 1}))
    hand.give("--make-vocab-size-divisible-by", hand.one({8: 6, 128: 1}))
    hand.perhaps(0.2, "--ffn-hidden-size", 96, 160)
    hand.perhaps(0.1, "--kv-channels", 4, 16)
    hand.perhaps(0.8, "--use-cpu-initialization")


def _pipeline(hand: Hand) -> None:
    """Interleaved stages, and how the stages are cut."""
    facts = hand.facts
    facts["interleaved"] = facts["pp"] == 2 and facts["layers"] == 4 and hand.chance(0.6)
    if facts["pp"] == 1:
        return
    if facts["interleaved"]:
        hand.give("--num-layers-per-virtual-pipeline-stage", 1)
        hand.perhaps(0.2, "--overlap-p2p-communication-warmup-flush")
    elif facts["layers"] == 4 and hand.chance(0.3):
        hand.give("--decoder-first-pipeline-num-layers", hand.one({1: 1, 3: 1}))
    elif hand.chance(0.15):
        hand.give("--account-for-embedding-in-pipeline-split")
        hand.give("--account-for-loss-in-pipeline-split")
    hand.perhaps(0.2, "--defer-embedding-wgrad-compute")
    if hand.has("--defer-embedding-wgrad-compute"):
        hand.perhaps(0.5, "--wgrad-deferral-limit", 1, 2)


def _attention(hand: Hand) -> None:
    if hand.chance(0.3):
        hand.give("--group-query-attention")
        hand.give("--num-query-groups", hand.rng.choice([hand.facts["tp"], 4, 8]))
    hand.perhaps(0.15, "--add-qkv-bias")
    if not hand.perhaps(0.15, "--qk-layernorm"):
        hand.perhaps(0.05, "--qk-l2-norm")
    hand.perhaps(0.1, "--attention-softmax-in-fp32")
    hand.perhaps(0.05, "--softmax-type", "off-by-one", "learnable")
    if hand.perhaps(0.08, "--window-size", "8,0", "4,0"):
        hand.perhaps(0.4, "--window-attn-skip-freq", 2)
    hand.perhaps(0.1, "--attention-backend", "unfused", "local", "auto", "flash", "fused")
    hand.perhaps(0.05, "--attention-output-gate")
    hand.perhaps(0.05, "--apply-wd-to-qk-layernorm")
    hand.perhaps(0.01, "--multi-latent-attention")


def _positions(hand: Hand) -> None:
    kind = hand.one({"rope": 6, "learned_absolute": 2, "none": 1})
    hand.give("--position-embedding-type", kind)
    if kind != "rope":
        return
    hand.perhaps(0.2, "--rotary-percent", 0.5, 0.25)
    hand.perhaps(0.15, "--rotary-interleaved")
    hand.perhaps(0.2, "--rotary-base", 500, 1000000)
    hand.perhaps(0.1, "--rotary-seq-len-interpolation-factor", 2)
    hand.perhaps(0.1, "--use-rope-scaling")
    hand.perhaps(0.05, "--no-rope-freq", 2)


def _mlp(hand: Hand) -> None:
    kind = hand.one({None: 5, "--swiglu": 5, "--squared-relu": 1, "--quick-geglu": 1})
    if kind:
        hand.give(kind)
    if kind in ("--squared-relu", "--quick-geglu"):
        hand.give("--no-bias-gelu-fusion")
        hand.give("--no-bias-swiglu-fusion")
    if kind == "--quick-geglu":
        hand.perhaps(0.2, "--glu-linear-offset", 1.0)
        hand.perhaps(0.2, "--activation-func-clamp-value", 1.0)
    hand.perhaps(0.35, "--disable-bias-linear")
    for fusion in ("gelu", "swiglu", "dropout"):
        hand.perhaps(0.15, f"--no-bias-{fusion}-fusion")


def _experts(hand: Hand) -> None:
    """Mixtures of experts; with tensor parallelism Megatron wants sequence parallelism too."""
    facts = hand.facts
    if facts["tp"] > 1 and not facts["sp"]:
        return
    facts["experts"] = True
    hand.give("--num-experts", hand.rng.choice([2, 4]))
    hand.give("--moe-router-topk", hand.rng.choice([1, 2]))
    if hand.chance(0.2) or hand.arguments[-1] == "1":
        hand.give("--moe-router-pre-softmax")
    hand.give("--disable-bias-linear")
    if facts["dp"] == 2:
        hand.perhaps(0.5, "--expert-model-parallel-size", 2)
    hand.perhaps(0.2, "--expert-tensor-parallel-size", 1)
    hand.perhaps(0.6, "--moe-token-dispatcher-type", "alltoall", "allgather")
    balance = hand.one(BALANCE)
    hand.give("--moe-router-load-balancing-type", balance)
    if balance.endswith("aux_loss"):
        hand.give("--moe-aux-loss-coeff", 0.01)
    hand.perhaps(0.2, "--moe-z-loss-coeff", 0.001)
    hand.perhaps(0.3, "--moe-shared-expert-intermediate-size", 64)
    if hand.has("--moe-shared-expert-intermediate-size"):
        if "allgather" not in hand.arguments:
            hand.perhaps(0.2, "--moe-shared-expert-overlap")
        hand.perhaps(0.2, "--moe-shared-expert-gate")
    if hand.perhaps(0.2, "--moe-expert-capacity-factor", 1.0, 2.0):
        hand.perhaps(0.3, "--moe-pad-expert-input-to-capacity")
        hand.perhaps(0.3, "--moe-token-drop-policy", "position")
    hand.perhaps(0.2, "--moe-router-dtype", "fp32", "fp64")
    if hand.perhaps(0.2, "--moe-router-score-function", "sigmoid"):
        hand.perhaps(0.5, "--moe-router-enable-expert-bias")
    hand.perhaps(0.15, "--moe-layer-freq", 2)
    hand.perhaps(0.15, "--moe-ffn-hidden-size", 96)
    hand.perhaps(0.1, "--moe-router-topk-scaling-factor", 2.0)
    if hand.arguments[hand.arguments.index("--moe-router-topk") + 1] == "1":
        hand.perhaps(0.2, "--moe-apply-probs-on-input")
    hand.perhaps(0.1, "--moe-input-jitter-eps", 0.01)
    hand.perhaps(0.05, "--moe-grouped-gemm")
    hand.perhaps(0.05, "--moe-router-force-load-balancing")
    hand.perhaps(0.05, "--moe-per-layer-logging")


def _variants(hand: Hand) -> None:
    hand.perhaps(0.4, "--normalization", "RMSNorm")
    hand.perhaps(0.15, "--apply-layernorm-1p")
    hand.perhaps(0.1, "--norm-epsilon", 1e-6, 1e-3)
    hand.perhaps(0.4, "--untie-embeddings-and-output-weights")
    hand.perhaps(0.1, "--init-method-std", 0.006, 0.05)
    hand.perhaps(0.03, "--init-method-xavier-uniform")
    hand.perhaps(0.05, "--embedding-init-method-std", 0.1)
    hand.perhaps(0.05, "--apply-residual-connection-post-layernorm")
    hand.perhaps(0.04, "--use-mup")
