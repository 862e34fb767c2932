"""Core attention over all tokens so far: keys and values stay in slots at fixed addresses."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class CachedAttention(torch.nn.Module):
    """In place of the core attention of megatron-core's `attention` layer.

    query, key and value [n, b, heads, d] -> [n, b, heads * d]. Keys and values go to `slots` [n]
    (int64, on the device) of the cache [b, heads, S, d], and a query sees all slots:
    `attention_mask` [b, 1, n, S] is added to its scores. The host reads no number here, so a CUDA
    graph can be replayed while `slots` changes.
    """

    def __init__(self, attention: Any, rows: int, slots: int, like: Tensor) -> None:
        super().__init__()
        heads = attention.num_attention_heads_per_partition
        shape = (rows, heads, slots, attention.hidden_size_per_attention_head)
        self.keys, self.values = like.new_zeros(shape), like.new_zeros(shape)
        self.slots = torch.zeros(0, dtype=torch.int64, device=like.device)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **_: Any
    ) -> Tensor:
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        self.keys.index_copy_(2, self.slots, key)
        self.values.index_copy_(2, self.slots, value)
        context = F.scaled_dot_product_attention(query, self.keys, self.values, attention_mask)
        return context.permute(2, 0, 1, 3).flatten(2)


def cache_in(decoder: Any, rows: int, slots: int, like: Tensor) -> list[CachedAttention]:
    """Give each layer of megatron-core's `TransformerBlock` a cache of `slots` tokens for `rows`
    prompts, in the dtype of `like` and where it lies.
    """
    cached = []
    for layer in decoder.layers:
        attention = layer.self_attention
        attention.core_attention = CachedAttention(attention, rows, slots, like)
        cached.append(attention.core_attention)
    return cached
