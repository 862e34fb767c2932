"""An arm of an experiment as arguments of Megatron-LM's `pretrain_gpt.py`, or as the file of
`flux-megatron train`.

The arguments are the same for all releases from core_v0.14.0 on; `parser_signature` holds them
against each.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

import yaml

from flux_megatron.launch.workload import Workload

POSITION = {"learned": "learned_absolute", "rope": "rope"}
DTYPE = {"bfloat16": ["--bf16"], "float16": ["--fp16"], "float32": []}
RECOMPUTE = {
    "none": "",
    "selective": "--recompute-granularity selective",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}
FP8 = {"none": ""} | {
    recipe: f"--fp8-format hybrid --fp8-recipe {recipe}" for recipe in ("tensorwise", "delayed")
}
# The values of the workload that an option takes as they are; the data-parallel size follows from
# the number of ranks.
SIZES = """
--num-layers=model.layers --hidden-size=model.hidden --num-attention-heads=model.heads
--ffn-hidden-size=model.ffn --seq-length=model.seq_length
--max-position-embeddings=model.seq_length --normalization=model.norm
--micro-batch-size=training.micro_batch --global-batch-size=training.global_batch
--train-iters=training.steps --lr=training.lr --min-lr=training.lr --seed=training.seed
--tensor-model-parallel-size=parallel.tp --pipeline-model-parallel-size=parallel.pp
"""
# Nothing in an experiment depends on these. The optimizer is that of Megatron-LM's GPT-3 175B
# example. Without dropout, because the arms draw random numbers in different orders. Every step is
# a line; finer timers would put barriers between the phases of a step.
SAME = """
--lr-decay-style constant --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0
--init-method-std 0.006 --attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer
--split 99,1,0 --no-create-attention-mask-in-dataloader
--log-interval 1 --log-throughput --timing-log-level 0 --eval-iters 0 --eval-interval 1000000
"""
CPU = """
--no-masked-softmax-fusion --no-rope-fusion --use-cpu-initialization --distributed-backend gloo
"""


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
    grouped, cpu = model.kv_heads != model.heads, workload.cluster.gpu == "cpu"
    flags = {
        "--swiglu": model.swiglu,
        "--disable-bias-linear": not model.linear_bias,
        "--untie-embeddings-and-output-weights": not model.tied_embeddings,
        "--group-query-attention": grouped,
        "--sequence-parallel": parallel.sequence_parallel and parallel.tp > 1,
        "--use-distributed-optimizer": training.distributed_optimizer,
        "--overlap-grad-reduce": training.overlap_grad_reduce,
        "--overlap-param-gather": training.overlap_param_gather,
        "--flux-overlap": workload.arm == "flux",
        "--tp-comm-overlap": workload.arm == "te",
        # without apex stock would run on a kernel of ours
        "--no-gradient-accumulation-fusion": cpu and workload.arm == "megatron",
    }
    options = {
        **{
            option: str(attrgetter(name)(workload))
            for option, name in (pair.split("=") for pair in SIZES.split())
        },
        "--position-embedding-type": POSITION[model.position],
        "--vocab-size": str(model.vocab - 1),  # the tokenizer adds an end of document
        # auto: the fastest of flash attention's implementations that are installed
        "--attention-backend": "auto" if training.flash_attention else "unfused",
        "--transformer-impl": _layers(workload),
    }
    if grouped:
        options["--num-query-groups"] = str(model.kv_heads)
    if model.experts:
        options["--num-experts"] = str(model.experts)
    if parallel.virtual_stages > 1:
        options["--num-virtual-stages-per-pipeline-rank"] = str(parallel.virtual_stages)
    if cache:
        options["--data-cache-path"] = str(cache)
    if save and save_interval:
        options |= {"--save": str(save), "--save-interval": str(save_interval)}
        options |= {"--ckpt-format": "torch_dist"}
        flags["--exit-signal-handler"] = True
    arguments = [word for option in options.items() for word in option]
    arguments += [flag for flag, given in flags.items() if given]
    arguments += [*DTYPE[training.dtype], *RECOMPUTE[training.recompute].split(), *SAME.split()]
    arguments += FP8[training.fp8].split()
    arguments += CPU.split() if cpu else []
    return [*arguments, *(["--data-path", *data] if data else ["--mock-data"])]


def resume(save: Path) -> list[str]:
    """What is added to go on from the newest checkpoint; without one, training starts anew.

    The schedule of the learning rate is that of these arguments: there may be more steps now.
    """
    return ["--load", str(save), "--override-opt_param-scheduler"]  # spelt so in every release


def program(
    workload: Workload, checkout: Path, arguments: Sequence[str]
) -> tuple[list[str], list[str]]:
    """What stands before the `arguments`, and what `flux-megatron doctor` must find for them."""
    script, cpu = str(checkout / "pretrain_gpt.py"), workload.cluster.gpu == "cpu"
    if workload.arm == "flux" or cpu:
        return ["-m", "flux_megatron.launch", *(["--device", "cpu"] if cpu else []), script], []
    # Megatron's own layers cannot be built without these
    there = {
        "transformer_engine": "transformer_engine" in arguments,
        "apex": "--no-gradient-accumulation-fusion" not in arguments,
    }
    return [script], [word for name in there if there[name] for word in ("--need", name)]


def _layers(workload: Workload) -> str:
    """Whose linear layers run. Stock and ours are of one specification.

    Megatron's local layers have no flash attention, and no RMSNorm for sequence parallelism.
    TransformerEngine's without `--tp-comm-overlap` have both, and FP8, and communicate one after
    the other with their GEMMs just so.
    """
    can = not workload.training.flash_attention and workload.model.norm == "LayerNorm"
    can = can and workload.training.fp8 == "none"
    local = workload.arm != "te" and (workload.cluster.gpu == "cpu" or can)
    return "local" if local else "transformer_engine"


def train_config(workload: Workload, data: Path | None, save_interval: int) -> str:
    """The arm as a YAML file of `flux-megatron train`; `rules` have refused what that cannot do.
    `data`: a folder of text; by default Python's standard library.
    """

    def same(part: object, names: str) -> dict[str, object]:
        return {name: getattr(part, name) for name in names.split()}

    model = workload.model
    config = {
        "model": {
            "num_layers": model.layers,
            "normalization": model.norm,
            "bias": model.linear_bias,
            "position_embedding": POSITION[model.position],
            **same(model, "hidden heads ffn seq_length swiglu tied_embeddings"),
        },
        "parallel": {
            "device": "cpu" if workload.cluster.gpu == "cpu" else "cuda",
            **same(workload.parallel, "tp sequence_parallel world_size"),
        },
        "data": {"path": str(data) if data else None},
        "train": {
            "save_every": save_interval or None,
            "log_every": 1,
            **same(workload.training, "steps micro_batch global_batch lr seed dtype"),
        },
        "layers": "flux" if workload.arm == "flux" else "stock",
        "strategy": "auto",
    }
    return yaml.safe_dump(config, sort_keys=False)
