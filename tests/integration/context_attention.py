"""A stand-in for TransformerEngine's attention, which alone does context parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region


def positions_here(length: int, rank: int | None = None) -> torch.Tensor:
    """Where this rank's tokens stand in the sequence: as Megatron has it, each rank has a chunk of
    the first half and its mirror image.
    """
    ranks = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank() if rank is None else rank
    if ranks == 1:
        return torch.arange(length)
    chunks = torch.arange(length).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


class ContextAttention(torch.nn.Module):
    """Causal; every rank gathers all keys and values."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        group = parallel_state.get_context_parallel_group()
        length = len(query) * group.size()
        key, value = (gather_from_sequence_parallel_region(t, group=group) for t in (key, value))
        theirs = torch.cat([positions_here(length, rank) for rank in range(group.size())])
        allowed = theirs <= positions_here(length)[:, None]
        context = F.scaled_dot_product_attention(
            *(t.permute(1, 2, 0, 3) for t in (query, key, value)), allowed, enable_gqa=True
        )
        return context.permute(2, 0, 1, 3).flatten(2)
