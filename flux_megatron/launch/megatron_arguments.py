"""An arm of an experiment as arguments of Megatron-LM's `pretrain_gpt.py`.

They are the same for all releases from core_v0.14.0 on; `parser_signature` holds them against each.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flux_megatron.launch.errors import LaunchError
from flux_megatron.launch.workload import Model, Parallel, Training, Workload

POSITION = {"learned": "learned_absolute", "rope": "rope"}
DTYPE = {"bfloat16": ["--bf16"], "float16": ["--fp16"], "float32": []}
# Nothing in an experiment depends on these; they are those of Megatron-LM's GPT-3 175B example.
OPTIMIZER = ["--adam-beta1", "0.9", "--adam-beta2", "0.95", "--weight-decay", "0.1"]
OPTIMIZER += ["--clip-grad", "1.0", "--init-method-std", "0.006"]


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
    if workload.model.moe:
        raise LaunchError("model.moe: experts are simulated; no launch has their arguments")
    return [
        *_model(workload.model),
        *_training(workload.training),
        *_parallel(workload.parallel, workload.training),
        *_layers(workload),
        *_data(data, cache),
        *_log(),
        *(_checkpoints(save, save_interval) if save and save_interval else []),
    ]


def resume(save: Path) -> list[str]:
    """What is added to go on from the newest checkpoint; without one, training starts anew.

    The schedule of the learning rate is that of these arguments: there may be more steps now.
    """
    return ["--load", str(save), "--override-opt_param-scheduler"]  # spelt so in every release


def needs_bootstrap(workload: Workload) -> bool:
    """Whether ranks run `-m flux_megatron.launch pretrain_gpt.py`, not the script itself."""
    return workload.arm == "flux" or workload.cluster.gpu == "cpu"


def _model(model: Model) -> list[str]:
    arguments = [
        *("--num-layers", str(model.layers)),
        *("--hidden-size", str(model.hidden)),
        *("--num-attention-heads", str(model.heads)),
        *("--ffn-hidden-size", str(model.ffn)),
        *("--seq-length", str(model.seq_length)),
        *("--max-position-embeddings", str(model.seq_length)),
        *("--position-embedding-type", POSITION[model.position]),
        *("--normalization", model.norm),
        # the arms draw random numbers in different orders: with dropout their losses would differ
        *("--attention-dropout", "0", "--hidden-dropout", "0"),
    ]
    if model.kv_heads != model.heads:
        arguments += ["--group-query-attention", "--num-query-groups", str(model.kv_heads)]
    if model.swiglu:
        arguments += ["--swiglu"]
    if not model.linear_bias:
        arguments += ["--disable-bias-linear"]
    if not model.tied_embeddings:
        arguments += ["--untie-embeddings-and-output-weights"]
    # this tokenizer adds an end-of-document token
    return [*arguments, "--tokenizer-type", "NullTokenizer", "--vocab-size", str(model.vocab - 1)]


def _training(training: Training) -> list[str]:
    arguments = [
        *("--micro-batch-size", str(training.micro_batch)),
        *("--global-batch-size", str(training.global_batch)),
        *("--train-iters", str(training.steps)),
        *("--lr", str(training.lr), "--min-lr", str(training.lr), "--lr-decay-style", "constant"),
        *OPTIMIZER,
        *("--seed", str(training.seed)),
        *DTYPE[training.dtype],
    ]
    if training.recompute == "selective":
        arguments += ["--recompute-granularity", "selective"]
    elif training.recompute == "full":
        arguments += ["--recompute-granularity", "full"]
        arguments += ["--recompute-method", "uniform", "--recompute-num-layers", "1"]
    # auto: the fastest of flash attention's implementations that are installed
    return [*arguments, "--attention-backend", "auto" if training.flash_attention else "unfused"]


def _parallel(parallel: Parallel, training: Training) -> list[str]:
    """The data-parallel size follows from the number of ranks."""
    arguments = ["--tensor-model-parallel-size", str(parallel.tp)]
    arguments += ["--pipeline-model-parallel-size", str(parallel.pp)]
    if parallel.virtual_stages > 1:
        arguments += ["--num-virtual-stages-per-pipeline-rank", str(parallel.virtual_stages)]
    flags = {
        "--sequence-parallel": parallel.sequence_parallel and parallel.tp > 1,
        "--use-distributed-optimizer": training.distributed_optimizer,
        "--overlap-grad-reduce": training.overlap_grad_reduce,
        "--overlap-param-gather": training.overlap_param_gather,
    }
    return arguments + [flag for flag, given in flags.items() if given]


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
    if not cpu:
        return arguments
    arguments += ["--no-masked-softmax-fusion", "--no-rope-fusion", "--use-cpu-initialization"]
    return [*arguments, "--distributed-backend", "gloo"]


def _stock_local_can_run(workload: Workload) -> bool:
    """Megatron's local layers have no flash attention, and no RMSNorm for sequence parallelism.

    TransformerEngine's without `--tp-comm-overlap` have both, and communicate one after the other
    with their GEMMs just so.
    """
    return not workload.training.flash_attention and workload.model.norm == "LayerNorm"


def _data(data: Sequence[str], cache: Path | None) -> list[str]:
    arguments = ["--data-path", *data] if data else ["--mock-data"]
    arguments += ["--split", "99,1,0", "--no-create-attention-mask-in-dataloader"]
    return [*arguments, *(["--data-cache-path", str(cache)] if cache else [])]


def _log() -> list[str]:
    """Every step is a line; finer timers would put barriers between the phases of a step."""
    arguments = ["--log-interval", "1", "--log-throughput", "--timing-log-level", "0"]
    return [*arguments, "--eval-iters", "0", "--eval-interval", "1000000"]


def _checkpoints(save: Path, interval: int) -> list[str]:
    arguments = ["--save", str(save), "--save-interval", str(interval)]
    return [*arguments, "--ckpt-format", "torch_dist", "--exit-signal-handler"]
