"""An arm of an experiment as arguments of Megatron-LM's `pretrain_gpt.py`.

They are the same for all releases from core_v0.14.0 on; `parser_signature` holds them against each.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

from flux_megatron.launch.errors import LaunchError
from flux_megatron.launch.workload import Workload

POSITION = {"learned": "learned_absolute", "rope": "rope"}
DTYPE = {"bfloat16": ["--bf16"], "float16": ["--fp16"], "float32": []}
RECOMPUTE = {
    "none": "",
    "selective": "--recompute-granularity selective",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}
# the values of the workload that an option takes as they are
SIZES = {
    "--num-layers": "model.layers",
    "--hidden-size": "model.hidden",
    "--num-attention-heads": "model.heads",
    "--ffn-hidden-size": "model.ffn",
    "--seq-length": "model.seq_length",
    "--max-position-embeddings": "model.seq_length",
    "--normalization": "model.norm",
    "--micro-batch-size": "training.micro_batch",
    "--global-batch-size": "training.global_batch",
    "--train-iters": "training.steps",
    "--lr": "training.lr",
    "--min-lr": "training.lr",
    "--seed": "training.seed",
    # the data-parallel size follows from the number of ranks
    "--tensor-model-parallel-size": "parallel.tp",
    "--pipeline-model-parallel-size": "parallel.pp",
}
# Nothing in an experiment depends on these. The optimizer is that of Megatron-LM's GPT-3 175B
# example. Without dropout, because the arms draw random numbers in different orders. Every step is
# a line; finer timers would put barriers between the phases of a step.
SAME = """
--lr-decay-style constant --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0
--init-method-std 0.006 --attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer
--split 99,1,0 --no-create-attention-mask-in-dataloader
--log-interval 1 --log-throughput --timing-log-level 0 --eval-iters 0 --eval-interval 1000000
"""
CPU = "--no-masked-softmax-fusion --no-rope-fusion --use-cpu-initialization"
CPU += " --distributed-backend gloo"


def render(
    workload: Workload,
    *,
    data: Sequence[str] = (),
    cache: Path | None = None,
    save: Path | None = None,
    save_interval: int = 0,
) -> list[str]:
    """The arguments of one rank; all ranks have the same.

    `data`: prefixes of indexed data sets, by default mock data; `cache`: folder of their indices.
    `save`: folder of checkpoints, written every `save_interval` steps, at the end and on SIGTERM.
    """
    model, training, parallel = workload.model, workload.training, workload.parallel
    if model.moe:
        raise LaunchError("model.moe: experts are simulated; no launch has their arguments")
    flags = {
        "--swiglu": model.swiglu,
        "--disable-bias-linear": not model.linear_bias,
        "--untie-embeddings-and-output-weights": not model.tied_embeddings,
        "--group-query-attention": model.kv_heads != model.heads,
        "--sequence-parallel": parallel.sequence_parallel and parallel.tp > 1,
        "--use-distributed-optimizer": training.distributed_optimizer,
        "--overlap-grad-reduce": training.overlap_grad_reduce,
        "--overlap-param-gather": training.overlap_param_gather,
    }
    arguments: list[str] = []
    for option, name in SIZES.items():
        arguments += [option, str(attrgetter(name)(workload))]
    arguments += ["--position-embedding-type", POSITION[model.position]]
    arguments += ["--vocab-size", str(model.vocab - 1)]  # the tokenizer adds an end of document
    arguments += [flag for flag, given in flags.items() if given]
    if model.kv_heads != model.heads:
        arguments += ["--num-query-groups", str(model.kv_heads)]
    if parallel.virtual_stages > 1:
        arguments += ["--num-virtual-stages-per-pipeline-rank", str(parallel.virtual_stages)]
    arguments += [*DTYPE[training.dtype], *RECOMPUTE[training.recompute].split(), *SAME.split()]
    # auto: the fastest of flash attention's implementations that are installed
    arguments += ["--attention-backend", "auto" if training.flash_attention else "unfused"]
    arguments += _layers(workload)
    arguments += ["--data-path", *data] if data else ["--mock-data"]
    arguments += ["--data-cache-path", str(cache)] if cache else []
    if save and save_interval:
        arguments += ["--save", str(save), "--save-interval", str(save_interval)]
        arguments += ["--ckpt-format", "torch_dist", "--exit-signal-handler"]
    return arguments


def resume(save: Path) -> list[str]:
    """What is added to go on from the newest checkpoint; without one, training starts anew.

    The schedule of the learning rate is that of these arguments: there may be more steps now.
    """
    return ["--load", str(save), "--override-opt_param-scheduler"]  # spelt so in every release


def needs_bootstrap(workload: Workload) -> bool:
    """Whether ranks run `-m flux_megatron.launch pretrain_gpt.py`, not the script itself."""
    return workload.arm == "flux" or workload.cluster.gpu == "cpu"


def _layers(workload: Workload) -> list[str]:
    """Whose linear layers run, and how. Stock and ours are of one specification."""
    cpu = workload.cluster.gpu == "cpu"
    local = workload.arm != "te" and (cpu or _stock_local_can_run(workload))
    arguments = ["--transformer-impl", "local" if local else "transformer_engine"]
    if workload.arm == "flux":
        arguments += ["--flux-overlap"]
    elif workload.arm == "te":
        arguments += ["--tp-comm-overlap"]
    elif cpu:  # without apex it would run on a kernel of ours
        arguments += ["--no-gradient-accumulation-fusion"]
    return [*arguments, *(CPU.split() if cpu else [])]


def _stock_local_can_run(workload: Workload) -> bool:
    """Megatron's local layers have no flash attention, and no RMSNorm for sequence parallelism.

    TransformerEngine's without `--tp-comm-overlap` have both, and communicate one after the other
    with their GEMMs just so.
    """
    return not workload.training.flash_attention and workload.model.norm == "LayerNorm"
