"""What a rank does: for each arm it builds the model, reads the weights, and decodes token by
token, all state at fixed addresses of the device.

The model's parts are called one by one, because `GPTModel.forward` numbers positions from 0 where
it is given no inference context. Megatron's own contexts keep the position on the host, which a
CUDA graph would repeat: docs/cluster.md.
"""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import Tensor

from flux_megatron.lab.generate.request import Request
from flux_megatron.lab.train.checkpoint import load_weights
from flux_megatron.lab.train.config import TrainConfig
from flux_megatron.lab.train.model import gpt_model, transformer_config
from flux_megatron.lab.train.run_folder import counts_of_all_ranks
from flux_megatron.lab.train.text import ByteTokenizer
from flux_megatron.overlap.report import reset_report
from flux_megatron.symm.step_end import synchronize

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
    def prefill(self, prompts: list[list[int]], multiple: int) -> None:
        """Read the prompts and decode the first `token`. Collective, as every step.

        The rows of a prompt are filled up to a multiple of `multiple`.
        """
        longest = max(map(len, prompts))
        width = -(-longest // multiple) * multiple
        rows = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
        self._first.copy_(torch.tensor([[width - len(prompt)] for prompt in prompts]))
        self._slot.fill_(width)
        self._forward(torch.tensor(rows, device=self.token.device), self._all_slots[:width])

    @torch.no_grad()
    def step(self) -> None:
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


def decode(config: TrainConfig, request: Request, device: torch.device) -> dict[str, Any]:
    """All arms of `request`, and how the second differs from the first. Collective."""
    arms, logits = {}, []
    for name in request.arms:
        arm_config = config.model_copy(update={"layers": name})
        arms[name], of_arm = decode_arm(arm_config, request, device)
        logits.append(of_arm)
    result: dict[str, Any] = {"arms": arms}
    if len(arms) == 2:
        tokens = [arm["tokens"] for arm in arms.values()]
        result["differences"], result["largest_logit_difference"] = differences(*tokens, *logits)
    return result


def decode_arm(
    config: TrainConfig, request: Request, device: torch.device
) -> tuple[dict[str, Any], list[Tensor]]:
    """One arm: its part of the result, and the logits [rows, vocab] of each step. Collective."""
    tokenizer, tp = ByteTokenizer(), config.parallel.tp
    prompts = [tokenizer.tokenize(prompt) or [tokenizer.eod] for prompt in request.prompts]
    rows, vocab = len(prompts), tokenizer.vocab_size
    core_config = replace(transformer_config(config), perform_initialization=False)
    model = gpt_model(config, core_config).to(device, getattr(torch, config.train.dtype))
    load_weights(request.checkpoint, model)
    decoder = Decoder(
        model, rows=rows, vocab=vocab, slots=max(map(len, prompts)) + tp + request.tokens,
        device=device,
    )  # fmt: skip
    reset_report()
    tokens: list[list[int]] = [[] for _ in prompts]
    seconds: list[float] = []
    unfinished, logits = {*range(rows)}, []
    while len(seconds) < request.tokens and unfinished:
        started = time.monotonic()
        decoder.step() if seconds else decoder.prefill(prompts, multiple=tp)
        synchronize()  # a step in which a wait came to its bound shows nothing
        newest = decoder.token.tolist()
        seconds.append(time.monotonic() - started)
        logits.append(decoder.logits.cpu().clone())
        for row in unfinished:
            tokens[row].append(newest[row])
        unfinished = {row for row in unfinished if newest[row] != tokenizer.eod}
    step_s = median(seconds[1:] or seconds)
    return {
        "tokens": tokens,
        "texts": [tokenizer.detokenize(one) for one in tokens],
        "prefill_s": seconds[0],
        "ms_per_step": step_s * 1e3,
        "tokens_per_s": rows / step_s,
        **counts_of_all_ranks(config, 2 * config.model.num_layers * decoder.forwards),
    }, logits


def differences(
    ours: list[list[int]], stock: list[list[int]], our_logits: list[Tensor], its: list[Tensor]
) -> tuple[list[dict[str, int]], float]:
    """The first other token of each prompt that has one, and the largest difference of logits up to
    there. Where that is small, rounding has decided a tie.
    """
    found, largest = [], 0.0
    for row, (a, b) in enumerate(zip(ours, stock, strict=True)):
        for step, (mine, theirs) in enumerate(zip(our_logits, its, strict=False)):
            largest = max(largest, float((mine[row] - theirs[row]).abs().max()))
            if step >= min(len(a), len(b)) or a[step] != b[step]:
                break
        if a != b:
            found.append({"prompt": row + 1, "token": step + 1, "flux": a[step], "stock": b[step]})
    return found, largest
