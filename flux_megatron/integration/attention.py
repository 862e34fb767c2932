"""megatron-core's core attention without its [b, heads, s, s] scores, where TransformerEngine's
cannot run.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

_MASKED = -10000.0  # what megatron-core puts in place of a masked score


class FluxCoreAttention(DotProductAttention):
    """megatron-core's `DotProductAttention` by torch's `scaled_dot_product_attention`.

    query [sq, b, heads, d], key and value [sk, b, groups, d] -> [sq, b, heads * d]. Constructor,
    parameters and checkpoints are megatron-core's, and so is what is computed for sliding windows
    and softmax offsets, and what is refused: packed sequences, biases, context parallelism. A row
    of which nothing is visible gives finite numbers, but others than megatron-core's.

    A mask is applied as it is given, as megatron-core does without its fused softmax, also to a
    causal layer, whose own mask it then replaces. Where all that causal layers are given is a
    causal mask (no --reset-attention-mask), set `reads_causal_masks = False`, on the class or a
    layer: masks cost torch its flash attention.
    """

    reads_causal_masks = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unknown = _unknown_to_torch(self)
        if self._unknown:
            warnings.warn(
                f"flux_megatron: {self._unknown} are computed by megatron-core's own attention, "
                "which stores all scores",
                stacklevel=2,
            )

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        attn_mask_type: Any = None, attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:  # fmt: skip
        mask, square = attention_mask, query.shape[0] == key.shape[0]
        causal = self.attn_mask_type == AttnMaskType.causal
        if causal and square and not self.reads_causal_masks:
            mask = None
        causal = causal and mask is None
        refused = attention_bias is not None or packed_seq_params is not None
        if refused or self._unknown or (causal and not square):
            return super().forward(
                query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params
            )
        if mask is not None:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask, _MASKED)
        grouped = key.shape[2] < query.shape[2]
        if grouped and (mask is not None or query.dtype == torch.float32):
            # of torch's fast kernels flash alone takes groups, but no masks and no fp32
            each = query.shape[2] // key.shape[2]
            key, value = key.repeat_interleave(each, 2), value.repeat_interleave(each, 2)
            grouped = False
        dropout = self.attention_dropout.p if self.attention_dropout.training else 0.0
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        with self._random_state(dropout):
            context = F.scaled_dot_product_attention(
                query, key, value, mask, dropout, causal, scale=self._scale(), enable_gqa=grouped
            )
        return context.permute(2, 0, 1, 3).flatten(2)

    def _scale(self) -> float:
        """megatron-core divides by the layer's number, to multiply again in its softmax."""
        by_layer = self.config.apply_query_key_layer_scaling
        return self.softmax_scale * (self.layer_number if by_layer else 1)

    def _random_state(self, dropout: float) -> contextlib.AbstractContextManager[None]:
        """This rank's own; under sequence parallelism the whole block already runs in it."""
        if dropout and not self.config.sequence_parallel:
            return tensor_parallel.get_cuda_rng_tracker().fork()
        return contextlib.nullcontext()


def _unknown_to_torch(attention: Any) -> str | None:
    """An option of this layer that torch's attention does not have, or None."""
    if getattr(attention.scale_mask_softmax, "window_size", None) is not None:
        return "sliding windows"
    if getattr(attention, "softmax_offset", None) is not None:
        return "softmax offsets"
    return None
