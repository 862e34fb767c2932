"""The cases of `te_launches`: arguments of pretrain_gpt.py."""

from __future__ import annotations

from collections.abc import Mapping

STEPS, SAVED = 20, 10
TP = 2
SEQUENCE, HIDDEN, HEADS = 1024, 1024, 16
COMMON = (
    f"--num-layers 4 --hidden-size {HIDDEN} --num-attention-heads {HEADS} "
    f"--ffn-hidden-size {4 * HIDDEN} --seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE} "
    "--micro-batch-size 2 --global-batch-size 4 --lr 3e-4 --min-lr 3e-4 --lr-decay-style constant "
    "--clip-grad 1.0 --weight-decay 0.1 --seed 7 --tokenizer-type NullTokenizer --vocab-size 8191 "
    "--mock-data --split 99,1,0 --eval-iters 0 --eval-interval 1000000 --log-interval 1 "
    f"--no-masked-softmax-fusion --tensor-model-parallel-size {TP} "
    "--transformer-impl transformer_engine"
)
SP = "--sequence-parallel"
PLAIN = "--attention-dropout 0 --hidden-dropout 0"
GPT = f"{SP} {PLAIN} --position-embedding-type learned_absolute --normalization LayerNorm"
LLAMA = (
    f"{SP} {PLAIN} --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --group-query-attention --num-query-groups 4 "
    "--untie-embeddings-and-output-weights"
)
LATENT = (
    LLAMA.replace(" --group-query-attention --num-query-groups 4", "")
    + " --multi-latent-attention --q-lora-rank 512"
)
MOE = "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall"
EP = "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
ZERO = "--use-distributed-optimizer"
CASES: Mapping[str, str] = {
    "GPT": GPT,
    "Llama": f"{LLAMA} {ZERO}",
    "dropout": GPT.replace(PLAIN, "--attention-dropout 0.1 --hidden-dropout 0.1"),
    "zero-centred norms": f"{LLAMA} --apply-layernorm-1p",
    "q/k norms": f"{LLAMA} --qk-layernorm",
    "full recompute": f"{LLAMA} --recompute-granularity full --recompute-method uniform "
                      "--recompute-num-layers 1",
    "selective recompute": f"{LLAMA} --recompute-granularity selective "
                           "--recompute-modules core_attn mlp layernorm",
    "experts": f"{LLAMA} {MOE} {EP}",
    "expert overlap": f"{LLAMA} {MOE} {EP}",
    "delayed weight gradients": f"{LLAMA} {MOE} {EP} --moe-shared-expert-intermediate-size 1024",
    "overlapped shared experts": f"{LLAMA} {MOE} {EP} --moe-shared-expert-intermediate-size 1024 "
                                 "--moe-shared-expert-overlap",
    "latent attention": LATENT,
    "multi-token prediction": f"{LLAMA} --mtp-num-layers 1",
    "CUDA graphs of layers": f"{GPT} --cuda-graph-impl local --te-rng-tracker",
    "TransformerEngine's graphs": GPT,
    "TransformerEngine's graphs of attention": GPT,
    "TransformerEngine's graphs of MLPs": f"{LLAMA} {ZERO}",
    "offloaded activations": f"{GPT} --cpu-offloading-num-layers 1",
    "no sequence parallelism": GPT.replace(SP, ""),
    "ours from stock's checkpoint": f"{LLAMA} {ZERO}",
    "stock from ours": f"{LLAMA} {ZERO}",
    "context parallelism": LLAMA,
    "overlapped replicas": f"{LLAMA} {ZERO}",
    "interleaved pipeline": LLAMA,
}  # fmt: skip
# their other ranks' share of the work; TransformerEngine has no context parallelism in fp32
OF_FOUR = {
    "context parallelism": "--context-parallel-size 2",
    "overlapped replicas": "--overlap-grad-reduce --overlap-param-gather",
    "interleaved pipeline": "--pipeline-model-parallel-size 2 "
                            "--num-layers-per-virtual-pipeline-stage 1",
}  # fmt: skip
BY_TE = "--cuda-graph-impl transformer_engine --te-rng-tracker"
# for which Megatron asks for 16 bits, and the reference has 32
OF_16_BITS = {
    "expert overlap": "--overlap-moe-expert-parallel-comm",
    "delayed weight gradients": "--overlap-moe-expert-parallel-comm --delay-wgrad-compute",
    "TransformerEngine's graphs": BY_TE,
    "TransformerEngine's graphs of attention": f"{BY_TE} --cuda-graph-scope attn",
    "TransformerEngine's graphs of MLPs": f"{BY_TE} --cuda-graph-scope mlp",
}
TENSORWISE = "--fp8-format hybrid --fp8-recipe tensorwise"
DELAYED = (
    "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 16 --fp8-amax-compute-algo max"
)
IN_FP8: Mapping[str, str] = {
    "GPT tensorwise": f"{GPT} {TENSORWISE}",
    "GPT delayed": f"{GPT} {DELAYED}",
    "Llama tensorwise": f"{LLAMA} {ZERO} {TENSORWISE}",
    "Llama delayed": f"{LLAMA} {ZERO} {DELAYED}",
    "gradients in e4m3": f"{LLAMA} --fp8-format e4m3 --fp8-recipe tensorwise",
    "parameters tensorwise": f"{LLAMA} {ZERO} {TENSORWISE} --fp8-param-gather",
    "parameters delayed": f"{LLAMA} {ZERO} {DELAYED} --fp8-param-gather",
    "first and last layers in bf16": f"{LLAMA} {TENSORWISE} --first-last-layers-bf16",
    "recomputed tensorwise": f"{LLAMA} {TENSORWISE} --recompute-granularity full "
                              "--recompute-method uniform --recompute-num-layers 1",
    "experts tensorwise": f"{LLAMA} {MOE} {EP} {TENSORWISE} --moe-router-padding-for-quantization",
    "latent attention tensorwise": f"{LATENT} {TENSORWISE}",
    "multi-token prediction tensorwise": f"{LLAMA} {TENSORWISE} --mtp-num-layers 1",
    "CUDA graphs of layers tensorwise": f"{GPT} {TENSORWISE} --cuda-graph-impl local "
                                         "--te-rng-tracker",
    "TransformerEngine's graphs of MLPs tensorwise":
        f"{LLAMA} {TENSORWISE} {BY_TE} --cuda-graph-scope mlp",
}  # fmt: skip
SAVED_BY = {"ours from stock's checkpoint": "stock", "stock from ours": "ours"}
# its LM head's wgrad fusion needs apex
STOCK = "--bf16 --no-gradient-accumulation-fusion"
ARMS = {
    "stock": STOCK,
    "ours": "--bf16 --flux-overlap",
    "reference": "--no-gradient-accumulation-fusion",
}
ARMS_IN_FP8 = {
    "stock": STOCK,
    "ours": "--bf16 --flux-overlap --flux-strict --flux-deterministic",
    "reference": f"{STOCK} --attention-backend unfused",
}


def arguments(case: str, arm: str, steps: int = STEPS) -> list[str]:
    """Of pretrain_gpt.py."""
    of_bf16 = (each.get(case, "") for each in (OF_FOUR, OF_16_BITS))
    more = "" if arm == "reference" else " ".join(of_bf16)
    arms = ARMS_IN_FP8 if case in IN_FP8 else ARMS
    model = {**CASES, **IN_FP8}[case]
    return f"{COMMON} {model} {arms[arm]} {more} --train-iters {steps}".split()


def ranks(case: str, arm: str) -> int:
    return 2 * TP if case in OF_FOUR and arm != "reference" else TP
