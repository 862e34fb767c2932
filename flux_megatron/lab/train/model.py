"""What is trained, from megatron-core: GPTModel, DistributedDataParallel, optimizer, schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import layers, mappings
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from flux_megatron.integration import building
from flux_megatron.lab.train.config import PADDED_VOCAB, TrainConfig
from flux_megatron.lab.train.specs import gpt_block_spec

ORDERS: dict[str, Callable[[list[torch.Tensor]], torch.Tensor]] = {
    "stock-rank-order": lambda partials: reduce(torch.add, [part.float() for part in partials]),
    "stock-reverse-order": lambda partials: reduce(torch.add, reversed(partials)),
}


class Trainee:
    """All that changes in training. `module` is the GPTModel inside the wrappers of `model`."""

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        loop, core_config = config.train, transformer_config(config)
        self.microbatches = config.microbatches(dist.get_world_size())
        self.module = gpt_model(config, core_config).to(device)
        inner = self.module
        if loop.dtype != "float32":
            inner = Float16Module(core_config, inner)
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            check_for_nan_in_grad=loop.dtype != "float16",  # which skips such a step
        )
        self.model = DistributedDataParallel(core_config, ddp, inner)
        optimizer_config = OptimizerConfig(
            optimizer="adam", lr=loop.lr, min_lr=loop.min_lr, weight_decay=loop.weight_decay,
            clip_grad=loop.clip, initial_loss_scale=2.0**16, **_precision(config),
        )  # fmt: skip
        self.optimizer = get_megatron_optimizer(optimizer_config, [self.model])
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, init_lr=0.0, max_lr=loop.lr, min_lr=loop.min_lr,
            lr_warmup_steps=loop.warmup_steps,
            lr_decay_steps=loop.decay_steps or loop.warmup_steps + 1,
            lr_decay_style="cosine" if loop.decay_steps else "constant",
            start_wd=loop.weight_decay, end_wd=loop.weight_decay,
            wd_incr_steps=1, wd_incr_style="constant",
        )  # fmt: skip
        core_config.finalize_model_grads_func = finalize_model_grads
        core_config.grad_scale_func = self.optimizer.scale_loss

    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])


@contextmanager
def layer_context(config: TrainConfig) -> Iterator[None]:
    """What must surround the run of a stock arm whose sums are in another order: Megatron's
    reduce-scatters are an all-to-all and a local sum. Two correct implementations that add the same
    partial sums in different orders drift apart in bfloat16, so how far stock drifts from itself
    bounds the drift of another correct one.
    """
    changed = (layers, mappings) if config.layers in ORDERS else ()
    originals = {module: module.dist_reduce_scatter_func for module in changed}
    for module in changed:
        module.dist_reduce_scatter_func = partial(_reduce_scatter, ORDERS[config.layers])
    try:
        yield
    finally:
        for module, original in originals.items():
            module.dist_reduce_scatter_func = original


class _Finished:
    """The handle of a collective that is already complete."""

    def wait(self) -> None: ...


def _reduce_scatter(
    add_up: Callable[[list[torch.Tensor]], torch.Tensor], output: torch.Tensor,
    input_: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False,
) -> _Finished | None:  # fmt: skip
    received = torch.empty_like(input_)
    dist.all_to_all_single(received, input_, group=group)
    output.copy_(add_up([*received.chunk(group.size())]))
    return _Finished() if async_op else None


def transformer_config(config: TrainConfig) -> TransformerConfig:
    """Megatron's configuration.

    Weights are drawn on the CPU, so that every layer class starts from the same bits.
    """
    model, parallel, precision = config.model, config.parallel, _precision(config)
    return TransformerConfig(
        num_layers=model.num_layers, hidden_size=model.hidden, ffn_hidden_size=model.ffn,
        num_attention_heads=model.heads, normalization=model.normalization,
        gated_linear_unit=model.swiglu, activation_func=F.silu if model.swiglu else F.gelu,
        add_bias_linear=model.bias, hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tp,
        sequence_parallel=parallel.sequence_parallel and parallel.tp > 1,
        use_cpu_initialization=True, pipeline_dtype=precision["params_dtype"],
        masked_softmax_fusion=False,  # its kernel comes with apex
        **precision,
    )  # fmt: skip


def gpt_model(config: TrainConfig, core_config: TransformerConfig) -> GPTModel:
    """The model on the CPU, or where Megatron draws weights; ours or stock by `config.layers`."""
    with building.linears() if config.layers == "flux" else nullcontext():
        return GPTModel(
            config=core_config,
            transformer_layer_spec=gpt_block_spec(core_config),
            vocab_size=PADDED_VOCAB,
            max_sequence_length=config.model.seq_length,
            share_embeddings_and_output_weights=config.model.tied_embeddings,
            position_embedding_type=config.model.position_embedding,
        )


def _precision(config: TrainConfig) -> dict[str, Any]:
    dtype = getattr(torch, config.train.dtype)
    return {
        "params_dtype": dtype, "bf16": dtype is torch.bfloat16, "fp16": dtype is torch.float16,
    }  # fmt: skip
