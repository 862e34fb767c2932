"""A model that decodes token by token, all its state at fixed addresses of the device.

The model's parts are called one by one, because `GPTModel.forward` numbers positions from 0 where
it is given no inference context. Megatron's own contexts keep the position on the host, which a
CUDA graph would repeat: docs/cluster.md.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import Tensor

MASK_MULTIPLE = 8  # a mask of other rows is copied by torch's attention, in every layer
EAGER_STEPS = 2  # before a capture: the first calls of their sizes allocate and compile


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


class Decoder:
    """Decodes `rows` prompts at once, into `slots` cached tokens each.

    The prompts end in the same slot, so that shorter ones begin later. `token` [rows] is what
    was decoded last, from `logits` [rows, vocab] in float32. All ranks have the same. On GPUs steps
    are replays of a CUDA graph. `forwards` counts the model's calls, a capture included.
    """

    def __init__(
        self, model: GPTModel, *, rows: int, slots: int, vocab: int, device: torch.device
    ) -> None:  # fmt: skip
        self.model, self.vocab = model.eval(), vocab
        self.forwards, self._steps = 0, 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captures = device.type == "cuda"
        like, slots = next(model.parameters()), -(-slots // MASK_MULTIPLE) * MASK_MULTIPLE
        attentions = [layer.self_attention for layer in model.decoder.layers]
        self._cached = [CachedAttention(one, rows, slots, like) for one in attentions]
        for attention, cached in zip(attentions, self._cached, strict=True):
            attention.core_attention = cached
        self._hidden = torch.full((), -torch.inf, dtype=like.dtype, device=device)
        self._visible = torch.zeros((), dtype=like.dtype, device=device)
        self._all_slots = torch.arange(slots, device=device)
        self._rotary = None
        if model.position_embedding_type == "rope":
            self._rotary = model.rotary_pos_emb(slots)[:, 0]
        self._first = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self._slot = torch.zeros(1, dtype=torch.int64, device=device)
        self.token = torch.zeros(rows, dtype=torch.int64, device=device)
        self.logits = torch.zeros(rows, vocab, device=device)

    @torch.no_grad()
    def prefill(self, prompts: list[list[int]], multiple: int = 1) -> Tensor:
        """Read the prompts and decode the first `token`. Collective, as every step.

        The rows of a prompt are filled up to a multiple of `multiple`.
        """
        longest = max(map(len, prompts))
        width = -(-longest // multiple) * multiple
        rows = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
        self._first.copy_(torch.tensor([[width - len(prompt)] for prompt in prompts]))
        self._slot.fill_(width)
        self._steps = 0
        self._forward(torch.tensor(rows, device=self.token.device), self._all_slots[:width])
        return self.token

    @torch.no_grad()
    def step(self) -> Tensor:
        """Decode the next `token`."""
        if self._graph is None and self._captures and self._steps >= EAGER_STEPS:
            self._graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            # the watchdog of NCCL queries events of its own meanwhile
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._advance()
        if self._graph is not None:
            self._graph.replay()
        else:
            self._advance()
        self._steps += 1
        return self.token

    def _advance(self) -> None:
        self._forward(self.token[:, None], self._slot)
        self._slot += 1

    def _forward(self, tokens: Tensor, slots: Tensor) -> None:
        """Read tokens [rows, n] into slots [n], and decode what follows the last one."""
        self.forwards += 1
        for attention in self._cached:
            attention.slots = slots
        positions = (slots - self._first).clamp_min(0)
        model: Any = self.model
        hidden = model.embedding(input_ids=tokens, position_ids=positions)
        hidden = model.decoder(
            hidden_states=hidden,
            attention_mask=self._mask(slots),
            rotary_pos_emb=None if self._rotary is None else self._rotary[positions.t()],
        )
        tied = model.share_embeddings_and_output_weights
        weight = model.shared_embedding_or_output_weight() if tied else None
        logits, _ = model.output_layer(hidden[-1:], weight=weight)
        logits = gather_from_tensor_model_parallel_region(logits)[0, :, : self.vocab]
        self.logits.copy_(logits)
        self.token.copy_(self.logits.argmax(-1))

    def _mask(self, slots: Tensor) -> Tensor:
        """What is added to scores: 0 for a prompt's own earlier slots and the query's, else -inf.

        A query before its prompt's beginning sees itself, because its result must be a number.
        """
        query, key = slots[:, None], self._all_slots
        begun = key >= self._first[:, None]
        visible = (key <= query) & (begun | (key == query))
        return torch.where(visible, self._visible, self._hidden)[:, None]
