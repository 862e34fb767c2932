"""The features of a training run, by name: what each sets, and how our linear layers run with it.

docs/support.md names each.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import side_by_side as sbs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import random as checkpointing
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from training_run import Feature

from flux_megatron.integration import apex_shim
from flux_megatron.symm import places

ALL = os.environ.get("FLUX_MEGATRON_ALL_FEATURES") == "1"
QUICKEST = "pipelined"  # interpreted, `fused` takes three times as long
LORA_RANK = 4


def freeze_most(model: GPTModel) -> None:
    """The first layer and what is below, so that no gradient gets there, and half of the second."""
    first, second = model.decoder.layers
    for module in (model.embedding, first, second.self_attention.linear_qkv, second.mlp.linear_fc2):
        module.requires_grad_(False)


def add_lora(model: GPTModel) -> None:
    model.requires_grad_(False)
    for layer in model.decoder.layers:
        for parent in (layer.self_attention, layer.mlp):
            for name, child in list(parent.named_children()):
                if isinstance(child, (ColumnParallelLinear, RowParallelLinear)):
                    setattr(parent, name, LoRA(child))


class LoRA(torch.nn.Module):
    """linear(x) + up(down(x)): one of the two is of the linear's class, the other is whole on each
    rank and sees a part of the sequence.
    """

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.linear = linear
        self.is_column = isinstance(linear, ColumnParallelLinear)
        options = {"config": linear.config, "init_method": torch.nn.init.xavier_normal_}
        options |= {"bias": False, "skip_bias_add": False}
        if self.is_column:
            self.down = _whole(linear.input_size, LORA_RANK)
            self.up = type(linear)(LORA_RANK, linear.output_size, gather_output=False, **options)
        else:
            options["input_is_parallel"] = True
            self.down = type(linear)(linear.input_size, LORA_RANK, **options)
            self.up = _whole(LORA_RANK, linear.output_size)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        y, bias = self.linear(x)
        more = self.up(self.down(x))[0] if self.is_column else self.up(self.down(x)[0])
        return y + more, bias


def _whole(inputs: int, outputs: int) -> torch.nn.Linear:
    linear = torch.nn.Linear(inputs, outputs, bias=False)
    linear.weight.sequence_parallel = True  # so that Megatron adds the ranks' gradients
    return linear


class Offloading(torch.autograd.graph.saved_tensors_hooks):
    """Stands for contexts that move saved tensors to the host and back."""

    def __init__(self) -> None:
        super().__init__(torch.clone, torch.clone)
        self.inside_context = False

    def __enter__(self) -> None:
        self.inside_context = True
        super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.inside_context = False


def offload_layers(model: GPTModel) -> None:
    """As with cpu_offloading, which needs Transformer Engine: the linear layers see the context."""
    model.decoder.offload_context = model.config._cpu_offloading_context = Offloading()


def offload_tensors(model: GPTModel) -> None:
    """As fine-grained offloading does: by hooks of which the linear layers know nothing."""
    model.decoder.offload_context = Offloading()


def each_rank_a_node() -> Any:
    return mock.patch.object(places, "machine", return_value=f"node-{dist.get_rank()}")


@contextlib.contextmanager
def names_of_te() -> Iterator[None]:
    """megatron-core 0.16.1 asks for these also where it did not find Transformer Engine."""
    no_fp8 = types.SimpleNamespace(is_fp8_enabled=lambda: False)
    nothing = {"create": True, "new": lambda **_: contextlib.nullcontext()}
    with (
        mock.patch.object(moe_utils, "te_general_gemm", None, create=True),
        mock.patch.object(checkpointing, "FP8GlobalStateManager", no_fp8, create=True),
        mock.patch.object(checkpointing, "activation_recompute_forward", **nothing),
        mock.patch.object(checkpointing, "fp8_autocast", **nothing),
    ):
        yield


def name_of_apex() -> Any:
    """Megatron imports its module when the pipeline drains."""
    return mock.patch.dict(sys.modules, {apex_shim.NAME: apex_shim.SHIM})


class _Event:
    """Of the only stream."""

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...


@contextlib.contextmanager
def two_streams() -> Iterator[None]:
    """What the schedule of two micro-batches asks of a GPU; also `names_of_te`."""
    nothing = dict.fromkeys(("range", "range_push"), lambda name: contextlib.nullcontext())
    nothing["range_pop"] = lambda: None
    with (
        names_of_te(),
        sbs.splits_as_lists(),
        mock.patch.object(torch.cuda, "Event", _Event),
        mock.patch.multiple(torch.cuda.nvtx, **nothing),
        mock.patch.object(torch.Tensor, "record_stream"),
    ):
        yield


LLAMA = {
    "normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu,
    "add_bias_linear": False, "num_query_groups": 4, "num_attention_heads": 8,
}  # fmt: skip
TIED = {"share_embeddings_and_output_weights": True}
FUSION = {"gradient_accumulation_fusion": True}
FULL = {"recompute_granularity": "full", "recompute_num_layers": 1}
UNIFORM = {**FULL, "recompute_method": "uniform"}
SELECTIVE = {
    **LLAMA,  # with biases the MLP's backward never ends: Megatron's checkpoint returns a parameter
    "recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp", "layernorm"],
}  # fmt: skip
MOE = {
    "num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False,
    "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2,
}  # fmt: skip
ALL_TO_ALL = {
    **MOE, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1,
    "moe_token_dispatcher_type": "alltoall",
}  # fmt: skip
# for which Megatron's configuration asks for 16 bits
TWO_MICROBATCHES = {"overlap_moe_expert_parallel_comm": True}
EARLY = dict.fromkeys(  # from 0.16 on
    {"ep_overlap_early_attn_memory_release"} & {*TransformerConfig.__dataclass_fields__}, True
)
DELAYED = {**TWO_MICROBATCHES, "delay_wgrad_compute": True}
MTP = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1}
ZERO = {"use_distributed_optimizer": True}
OVERLAP = {**ZERO, "overlap_grad_reduce": True, "overlap_param_gather": True}
DELAYED_DDP = {**OVERLAP, "delay_wgrad_compute": True}
FOUR_LAYERS = {"num_layers": 4}
OVERLAPPED_P2P = {**FOUR_LAYERS, "overlap_p2p_comm": True, "batch_p2p_comm": False}
LENGTHS = (16, 8, 24)
# Megatron asks for this dispatcher also where there are no experts
LENGTHS_BETWEEN_STAGES = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}

PP = {"pp": 2, "microbatches": 3}
VPP = {"pp": 2, "vp": 2, "microbatches": 2}
LOW = {"tp": 4, "steps": 4, "config": {"num_layers": 1}}

FEATURES: dict[str, Feature] = {
    "sequence parallel": Feature(quick=True),
    "sequence parallel off": Feature(sp=False, quick=True),
    "GQA, SwiGLU, RMSNorm, untied": Feature(config=LLAMA, quick=True),
    "tied embeddings": Feature(model=TIED),
    "gradient accumulation": Feature(microbatches=3),
    "wgrad fusion": Feature(config=FUSION, microbatches=2, quick=True),
    "wgrad fusion, tied": Feature(config=FUSION, microbatches=2, model=TIED),
    "dropout": Feature(config={"hidden_dropout": 0.1, "attention_dropout": 0.1}, quick=True),
    "full recompute, uniform": Feature(config=UNIFORM, quick=True),
    "full recompute, block": Feature(config={**FULL, "recompute_method": "block"}),
    "selective recompute": Feature(
        config={**SELECTIVE, **FUSION}, microbatches=2, around=names_of_te, quick=True
    ),
    "activation offload by layers": Feature(prepare=offload_layers),
    "activation offload by tensors": Feature(prepare=offload_tensors),
    "frozen weights": Feature(prepare=freeze_most, quick=True),
    "LoRA": Feature(prepare=add_lora, quick=True),
    "LoRA, wgrad fusion": Feature(prepare=add_lora, config=FUSION),
    "variable sequence lengths": Feature(lengths=LENGTHS, quick=True),
    "tensor parallel over nodes": Feature(
        around=each_rank_a_node, runs="the group spans 2 nodes", quick=True
    ),
    "MoE": Feature(config=MOE, around=names_of_te, quick=True),
    "MoE, shared experts": Feature(
        config={**MOE, "moe_shared_expert_intermediate_size": 64}, around=names_of_te, quick=True
    ),
    "MoE, shared experts, overlapped": Feature(
        config={
            **ALL_TO_ALL, "moe_shared_expert_intermediate_size": 64,
            "moe_shared_expert_overlap": True,
        },
        around=two_streams, quick=True,
    ),
    "multi-token prediction": Feature(config=MTP, quick=True),
    "deterministic mode": Feature(config={"deterministic_mode": True}),
    "pipeline": Feature(**PP),
    "pipeline, tied, wgrad fusion": Feature(**PP, config=FUSION, model=TIED, quick=True),
    "pipeline, deferred weight gradient of the LM head": Feature(
        **PP, config=FUSION, only_ours={"defer_embedding_wgrad_compute": True},
        around=name_of_apex, quick=True,
    ),
    "pipeline, interleaved": Feature(**VPP, config=FOUR_LAYERS, quick=True),
    "pipeline, interleaved, overlapped p2p": Feature(
        **VPP, config=OVERLAPPED_P2P
    ),
    "pipeline, variable sequence lengths": Feature(
        **PP, config=LENGTHS_BETWEEN_STAGES, lengths=LENGTHS
    ),
    "pipeline, full recompute": Feature(**PP, config=UNIFORM),
    "pipeline, multi-token prediction": Feature(**PP, config=MTP, model=TIED),
    "data parallel": Feature(dp=2),
    "data parallel, overlapped grad-reduce": Feature(dp=2, ddp={"overlap_grad_reduce": True}),
    "distributed optimizer": Feature(dp=2, ddp=ZERO),
    "distributed optimizer, overlapped": Feature(
        dp=2, ddp=OVERLAP, config=FUSION, microbatches=2, quick=True
    ),
    "distributed optimizer, overlapped, interleaved": Feature(
        **VPP, dp=2, ddp={**OVERLAP, "align_param_gather": True}, config={**FOUR_LAYERS, **FUSION}
    ),
    "MoE, expert parallel": Feature(
        dp=2, config={**MOE, "expert_model_parallel_size": 2}, around=names_of_te
    ),
    "MoE, expert parallel, overlapped": Feature(
        config=ALL_TO_ALL, unchecked={**TWO_MICROBATCHES, **EARLY}, microbatches=3,
        around=two_streams,
    ),
    "MoE, expert parallel, overlapped, delayed weight gradients": Feature(
        dp=2, config={**ALL_TO_ALL, **FUSION, "moe_shared_expert_intermediate_size": 64},
        ddp=DELAYED_DDP, unchecked=DELAYED, microbatches=3, around=two_streams, quick=True,
    ),
    "pipeline, interleaved, MoE, expert parallel, overlapped, delayed weight gradients": Feature(
        pp=2, vp=2, microbatches=4,
        config={**ALL_TO_ALL, **OVERLAPPED_P2P, "moe_layer_freq": [0, 1] * 2},
        ddp={"delay_wgrad_compute": True}, unchecked=DELAYED, around=two_streams,
    ),
    "context parallel, CP 2": Feature(cp=2, config={**LLAMA, **FUSION}, microbatches=2, quick=True),
    "TP 4": Feature(tp=4, config={**LLAMA, **FUSION}),
    "bf16": Feature(**LOW, dtype=torch.bfloat16, quick=True),
    "fp16": Feature(**LOW, dtype=torch.float16),
    "fp32 residuals": Feature(
        **{**LOW, "config": {"num_layers": 1, "fp32_residual_connection": True}},
        dtype=torch.bfloat16,
    ),
}  # fmt: skip

# what is set, and how it is refused on every rank when a model is built
REFUSED: dict[str, tuple[Feature, type[Exception], str]] = {
    "deferred weight gradient of the LM head, without apex": (
        Feature(tp=1, pp=2, config={**FUSION, "defer_embedding_wgrad_compute": True}),
        RuntimeError,
        "defer_embedding_wgrad_compute needs apex",
    ),
    "CPU offloading, without TransformerEngine": (
        Feature(config={"cpu_offloading": True, "cpu_offloading_num_layers": 1}),
        AssertionError,
        "CPU Offloading is enabled when TE is not present",
    ),
    "context parallel, without TransformerEngine": (
        Feature(config={"context_parallel_size": 2}),
        AssertionError,
        "Context parallelism is only supported by TEDotProductAttention",
    ),
}
