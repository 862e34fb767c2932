"""How the model is trained: precision, batches, recomputation, optimizer, checkpoint; our knobs."""

from __future__ import annotations

from drawing import Combination, Hand

ITERATIONS, HALF = 5, 3
FIXED = {
    "--train-iters": ITERATIONS, "--lr": 1e-3, "--adam-eps": 1e-4,
    "--log-interval": 1, "--eval-interval": 1000, "--split": "90,10,0", "--num-workers": 0,
    "--tokenizer-type": "NullTokenizer", "--distributed-timeout-minutes": 1,
}  # fmt: skip
FLAGS = ("--mock-data", "--log-params-norm", "--no-masked-softmax-fusion", "--no-rope-fusion")
LAYERS = ("qkv", "proj", "fc1", "fc2", "head")
HALF_PRECISION_ALONE = {  # and how many values they have
    "--bf16": 0, "--fp16": 0, "--fp32-residual-connection": 0, "--initial-loss-scale": 1,
    "--loss-scale": 1, "--fp16-lm-cross-entropy": 0, "--apply-query-key-layer-scaling": 0,
    "--grad-reduce-in-bf16": 0, "--accumulate-allreduce-grads-in-fp32": 0,
}  # fmt: skip


def draw(hand: Hand) -> None:
    for option, value in FIXED.items():
        hand.give(option, value)
    for flag in FLAGS:
        hand.give(flag)
    _precision(hand)
    _batches(hand)
    _recompute(hand)
    _optimizer(hand)
    _losses_and_data(hand)
    share = 0.35 if hand.has("--use-distributed-optimizer") else 0.15
    if hand.chance(share) and not hand.has("--optimizer"):  # Megatron cannot save SGD's state
        _checkpoint(hand)


def _precision(hand: Hand) -> None:
    precision = hand.facts["precision"] = hand.one({"fp32": 75, "bf16": 17, "fp16": 8})
    if precision == "fp32":
        return
    hand.perhaps(0.15, "--fp32-residual-connection")
    hand.give(f"--{precision}")
    if precision == "fp16":
        hand.give("--initial-loss-scale", 1024)
        hand.perhaps(0.2, "--fp16-lm-cross-entropy")
        hand.perhaps(0.2, "--apply-query-key-layer-scaling")
    hand.perhaps(0.4, "--accumulate-allreduce-grads-in-fp32")
    hand.perhaps(0.2, "--grad-reduce-in-bf16")


def _batches(hand: Hand) -> None:
    facts = hand.facts
    size = hand.one({1: 2, 2: 3})
    count = hand.one({2: 3, 4: 1}) if facts["pp"] == 2 else hand.one({1: 5, 2: 3})
    hand.give("--micro-batch-size", size)
    hand.give("--global-batch-size", size * count * facts["dp"])


def _recompute(hand: Hand) -> None:
    kind = hand.one({None: 6, "full": 2, "selective": 2})
    if kind == "full":
        hand.give("--recompute-granularity", kind)
        hand.give("--recompute-method", hand.rng.choice(["uniform", "block"]))
        hand.give("--recompute-num-layers", 1)
        if not hand.facts["sp"] and hand.facts["tp"] > 1:
            hand.perhaps(0.3, "--distribute-saved-activations")
    elif kind == "selective":
        hand.give("--recompute-granularity", kind)
        # with biases the backward of a recomputed MLP does not end in Megatron either
        modules = ["core_attn", "layernorm"] + ["mlp"] * hand.has("--disable-bias-linear")
        if hand.facts["experts"]:
            modules = ["core_attn", "moe"]
        hand.give("--recompute-modules", *hand.some(modules))


def _optimizer(hand: Hand) -> None:
    if hand.chance(0.1):
        hand.give("--optimizer", "sgd")
        hand.perhaps(0.5, "--sgd-momentum", 0.5)
    hand.perhaps(0.2, "--clip-grad", 0.0, 0.1)
    hand.perhaps(0.2, "--weight-decay", 0.0, 0.1)
    if hand.chance(0.05):
        hand.give("--weight-decay-incr-style", hand.rng.choice(["linear", "cosine"]))
        hand.give("--start-weight-decay", 0.01)
        hand.give("--end-weight-decay", 0.1)
    hand.give("--lr-decay-style", hand.one({"constant": 5, "cosine": 2, "linear": 1}))
    hand.perhaps(0.2, "--min-lr", 1e-4)
    hand.perhaps(0.1, "--lr-warmup-iters", 2)
    hand.perhaps(0.1, "--adam-beta2", 0.95)
    hand.perhaps(0.05, "--decoupled-lr", 5e-4)
    if hand.has("--optimizer"):
        pass
    elif hand.chance(0.5 if hand.facts["dp"] > 1 else 0.2):
        hand.give("--use-distributed-optimizer")
        if hand.perhaps(0.5, "--overlap-grad-reduce"):
            hand.perhaps(0.6, "--overlap-param-gather")
    elif hand.facts["dp"] > 1:
        hand.perhaps(0.4, "--overlap-grad-reduce")
    if hand.has("--overlap-grad-reduce"):
        if not hand.perhaps(0.4, "--ddp-bucket-size", 1000, 20000):
            hand.perhaps(0.2, "--ddp-num-buckets", 2)
        hand.perhaps(0.3, "--no-align-grad-reduce")
    if hand.has("--overlap-param-gather"):
        hand.perhaps(0.3, "--no-align-param-gather")
    hand.perhaps(0.1, "--no-gradient-reduce-div-fusion")


def _losses_and_data(hand: Hand) -> None:
    hand.give("--hidden-dropout", hand.one({0: 4, 0.1: 1}))
    # torch's attention, ours without TransformerEngine, draws other numbers than stock's
    hand.give("--attention-dropout", hand.one({0: 4, 0.1: 1}) if hand.facts["te"] else 0)
    if not hand.perhaps(0.15, "--calculate-per-token-loss"):
        hand.perhaps(0.1, "--ddp-average-in-collective")
    if not hand.perhaps(0.1, "--cross-entropy-loss-fusion"):
        hand.perhaps(0.1, "--deterministic-mode")
    # Megatron's own evaluation fails where the embedding's gradients are deferred
    deferred = hand.has("--defer-embedding-wgrad-compute")
    hand.give("--eval-iters", 0 if deferred else hand.one({0: 4, 1: 1}))
    hand.perhaps(0.6, "--no-create-attention-mask-in-dataloader")
    hand.perhaps(0.1, "--reset-position-ids")
    hand.perhaps(0.1, "--reset-attention-mask")
    hand.perhaps(0.1, "--eod-mask-loss")
    hand.perhaps(0.1, "--dataloader-type", "cyclic", "single")
    hand.perhaps(0.1, "--seed", 7, 77)


def _checkpoint(hand: Hand) -> None:
    hand.facts["resume"] = hand.one({"own": 2, "stock": 2, "ours": 1})
    kind = hand.one({"torch_dist": 5, "torch": 2})
    hand.give("--ckpt-format", kind)
    if kind == "torch_dist":
        hand.perhaps(0.3, "--dist-ckpt-optim-fully-reshardable")
        hand.perhaps(0.2, "--no-ckpt-fully-parallel-save")
        hand.perhaps(0.2, "--ckpt-fully-parallel-load")
        hand.perhaps(0.2, "--dist-ckpt-save-pre-mcore-014")
        hand.perhaps(0.2, "--ckpt-assume-constant-structure")
        hand.perhaps(0.2, "--dist-ckpt-strictness", "raise_all", "log_all")
    for what in ("optim", "rng"):
        if hand.perhaps(0.1, f"--no-save-{what}"):
            hand.give(f"--no-load-{what}")


def knobs(hand: Hand) -> list[str]:
    """Ours. Interpreted kernels take seconds where `pipelined` takes milliseconds."""
    interpreted = 0.3 if hand.facts["tp"] == 4 else 1
    strategy = hand.one({
        "pipelined": 60, "fused": 17 * interpreted, "auto": 13 * interpreted, "sequential": 10,
    })  # fmt: skip
    given = ["--flux-overlap"]
    if strategy != "auto" or hand.chance(0.3):
        given += ["--flux-strategy", strategy]
    if hand.chance(0.3):
        given += ["--flux-layers", *hand.some(LAYERS)]
    for share, knob in ((0.3, "save-gathered"), (0.1, "deterministic"), (0.05, "trace")):
        if hand.chance(share):
            given.append(f"--flux-{knob}")
    if hand.facts["sp"] and strategy != "sequential" and hand.chance(0.1):
        given.append("--flux-strict")
    if hand.chance(0.08):
        given += ["--flux-compare", "2"]
    # ours fuses without apex; with this option both return gradients
    if not hand.has("--defer-embedding-wgrad-compute") and hand.chance(0.35):
        given.append("--no-gradient-accumulation-fusion")
    return given


def of_stock(hand: Hand) -> list[str]:
    """Without apex stock fuses nothing; to defer gradients it needs what stands in for apex."""
    deferred = hand.has("--defer-embedding-wgrad-compute")
    return [] if deferred else ["--no-gradient-accumulation-fusion"]


def in_fp32(combination: Combination) -> list[str]:
    """The arguments of both arms for the same run in fp32."""
    kept, left = [], 0
    for argument in combination.arguments:
        if argument.startswith("--"):
            left = 1 + HALF_PRECISION_ALONE[argument] if argument in HALF_PRECISION_ALONE else 0
        if left:
            left -= 1
        else:
            kept.append(argument)
    return kept
