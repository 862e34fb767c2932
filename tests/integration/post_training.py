"""What post-training does to small models: packed sequences, log-probabilities, steps of SGD."""

from __future__ import annotations

from typing import Any
from unittest import mock

import side_by_side as sbs
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import torch_norm
from megatron.core.transformer.dot_product_attention import DotProductAttention

from flux_megatron.integration.norm import FluxNorm

BOUND = 1e-5  # of losses and weights in fp32: docs/tests.md
VOCAB = 32
# tokens of the sequences of a micro-batch; those of no token are the padding of `cu_seqlens`. For
# the third one symmetric memory grows
EVEN = [(5, 3), (6,), (70, 0, 9, 1), (14, 0, 0), (1, 1)]
SPEC = get_gpt_layer_local_spec(normalization="RMSNorm")  # as a framework holds it


def config(sp: bool, **more: Any) -> Any:
    return sbs.settings(
        2, sp, torch.float32,
        **{"hidden_size": 16, "ffn_hidden_size": 32, "normalization": "RMSNorm", **more},
    )  # fmt: skip


def build(sp: bool, **more: Any) -> GPTModel:
    sbs.seed()
    return GPTModel(config(sp, **more), SPEC, VOCAB, 64, position_embedding_type="rope")


def with_our_norms(sp: bool, **more: Any) -> GPTModel:
    """Stock: its norms refuse sequence parallelism."""
    original = vars(torch_norm.WrappedTorchNorm)["__new__"]
    torch_norm.WrappedTorchNorm.__new__ = lambda cls, *args, **kwargs: FluxNorm(*args, **kwargs)
    try:
        return build(sp, **more)
    finally:
        torch_norm.WrappedTorchNorm.__new__ = original


def packed(lengths: tuple[int, ...], seed: int) -> tuple[torch.Tensor, ...]:
    """Tokens [1, all] of several sequences in a row, their positions and labels."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (1, sum(lengths) + 1), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return tokens[:, :-1].contiguous(), positions, tokens[:, 1:].contiguous()


DENSE = DotProductAttention.forward


def attend_in_sequences(
    self: Any, q: Any, k: Any, v: Any, mask: Any, *, packed_seq_params: Any, **more: Any
) -> torch.Tensor:
    """Stands for TransformerEngine's attention of `thd`, which Megatron's own has not."""
    order = torch.arange(len(q))
    number = torch.bucketize(order, packed_seq_params.cu_seqlens_q[1:], right=True)
    mask = (number[:, None] != number) | (order[:, None] < order)
    return DENSE(self, *(part[:, None] for part in (q, k, v)), mask[None, None], **more)


attention_of_sequences = mock.patch.object(DotProductAttention, "forward", attend_in_sequences)


def run(model: GPTModel, lengths: tuple[int, ...], seed: int, labelled: bool = True) -> Any:
    """Losses [1, total], or what the head returns where there are no labels."""
    tokens, positions, labels = packed(lengths, seed)
    begins = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    thd = PackedSeqParams("thd", begins, begins)
    thd.max_seqlen_q = thd.max_seqlen_kv = max(lengths)
    more = {"labels": labels} if labelled else {}
    return model(tokens, positions, None, packed_seq_params=thd, **more)


def log_probs(model: GPTModel, lengths: tuple[int, ...], seed: int) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        found = run(model, lengths, seed)
    model.train()
    return found


def learn(model: GPTModel, micro_batches: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """One step of SGD; the last micro-batch is padding alone: it counts for nothing."""
    seen = []
    for seed, lengths in enumerate(micro_batches):
        found = run(model, lengths, seed)
        seen.append(found.detach())
        (found.mean() * (seed + 1 < len(micro_batches))).backward()
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(parameter.grad)
        seen.append(parameter.grad)
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None
    return seen
