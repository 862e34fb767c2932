"""A GRPO-like step for `post_training.py`, on a GPT model of megatron-core's with our layers."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from flux_megatron.lab.measure.dynamic_layers import MODELS
from flux_megatron.lab.measure.gpu_run import Run

SEED = 20261126
CLIP = 0.2


@dataclass(frozen=True)
class Size:
    layers: int
    vocabulary: int
    least: int  # tokens of a micro-batch
    largest: int
    micro_batches: int


WHOLE = Size(4, 151936, 2048, 16384, 4)
IN_SMALL = Size(1, 64, 8, 40, 2)


def build(run: Run, name: str, sp: bool, size: Size) -> Any:
    """A GPT model under `enable`, with torch's attention for each sequence by itself."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from flux_megatron.integration import enabling

    cpu, dtype = run.device.type == "cpu", getattr(torch, run.about.dtype)
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=run.group.size())
    tensor_parallel.model_parallel_cuda_manual_seed(SEED, force_reset_rng=True)
    torch.manual_seed(SEED)
    enabling.enable()
    widths = MODELS[name]
    config = TransformerConfig(
        num_layers=size.layers, hidden_size=widths.hidden, ffn_hidden_size=widths.ffn,
        num_attention_heads=widths.heads, num_query_groups=widths.kv_heads,
        kv_channels=widths.head_dim, gated_linear_unit=True, activation_func=F.silu,
        normalization="RMSNorm", add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=run.group.size(), sequence_parallel=sp, params_dtype=dtype,
        pipeline_dtype=dtype, bf16=dtype == torch.bfloat16, use_cpu_initialization=cpu,
        masked_softmax_fusion=False, gradient_accumulation_fusion=False,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True)
    spec.submodules.self_attention.submodules.core_attention = _attention()
    model = GPTModel(
        config, spec, vocab_size=size.vocabulary, max_sequence_length=size.largest,
        position_embedding_type="rope", share_embeddings_and_output_weights=False,
    )  # fmt: skip
    return model.to(run.device)


def _attention() -> type:
    from flux_megatron.integration.attention import FluxCoreAttention

    class PackedAttention(FluxCoreAttention):
        reads_causal_masks = False
        lengths: tuple[int, ...] = ()

        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any
        ) -> Any:
            split = zip(*(one.split(self.lengths) for one in (query, key, value)), strict=True)
            forward = super().forward
            return torch.cat([forward(*one, *rest, **more) for one in split])

    return PackedAttention


@dataclass(frozen=True)
class MicroBatch:
    lengths: tuple[int, ...]
    tokens: Tensor
    positions: Tensor
    labels: Tensor
    advantages: Tensor


def packed(run: Run, total: int, size: Size, drawn: random.Random) -> MicroBatch:
    """Sequences of random lengths, `total` tokens together; the same on every rank."""
    cuts = sorted({0, total, *(drawn.randrange(1, total) for _ in range(drawn.randrange(8)))})
    lengths = tuple(b - a for a, b in itertools.pairwise(cuts))
    made = torch.Generator().manual_seed(drawn.randrange(2**31))
    tokens = torch.randint(size.vocabulary, (1, total + 1), generator=made).to(run.device)
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(run.device)
    advantages = torch.randn(1, total, generator=made).to(run.device)
    return MicroBatch(lengths, tokens[:, :-1], positions, tokens[:, 1:].contiguous(), advantages)


class Loop:
    """The model and its optimizer, and a step in either arm."""

    def __init__(self, run: Run, name: str, sp: bool, size: Size) -> None:
        self.run, self.sp, self.size = run, sp, size
        self.model = build(run, name, sp, size)
        fused = run.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=fused)
        attention = [layer.self_attention.core_attention for layer in self.model.decoder.layers]
        self._attention = type(attention[0])

    def log_probabilities(self, batch: MicroBatch) -> Tensor:
        self._attention.lengths = batch.lengths
        return -self.model(batch.tokens, batch.positions, None, labels=batch.labels).float()

    def old(self, batches: list[MicroBatch]) -> list[Tensor]:
        with torch.no_grad():
            return [self.log_probabilities(batch) for batch in batches]

    def train(self, batches: list[MicroBatch], old: list[Tensor]) -> None:
        self.optimizer.zero_grad()
        for batch, before in zip(batches, old, strict=True):
            ratio = (self.log_probabilities(batch) - before).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            gain = torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
            (-gain.mean() / len(batches)).backward()
        for parameter in self.model.parameters():
            if getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(parameter.grad, group=self.run.group)
        self.optimizer.step()

    def step(self, batches: list[MicroBatch], stock: bool) -> list[float]:
        """Seconds of the log-probabilities and of the training pass, of the slowest rank."""
        from flux_megatron.integration import arm

        with arm.use(stock=stock):
            old, first = self._timed(lambda: self.old(batches))
            _, second = self._timed(lambda: self.train(batches, old))
        return self.run.slowest(torch.tensor([first, second], dtype=torch.float64)).tolist()

    def _timed(self, call: Callable[[], Any]) -> tuple[Any, float]:
        self.run.align()
        begin = time.perf_counter()
        result = call()
        self.run.synchronize()
        return result, time.perf_counter() - begin

    def draw(self, drawn: random.Random) -> list[MicroBatch]:
        size, unit = self.size, self.run.group.size() if self.sp else 1
        totals = [drawn.randrange(size.least, size.largest) for _ in range(size.micro_batches)]
        return [packed(self.run, -(-total // unit) * unit, size, drawn) for total in totals]
