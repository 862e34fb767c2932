"""DeepEP as a peer of whole layers of experts: a token travels once to a rank, by its kernels of
one machine, and TransformerEngine's kernels permute there.

As Megatron-LM has it with `--moe-enable-deepep` and `--moe-permute-fusion`. Read with DeepEP 1.2.1,
built without NVSHMEM, and TransformerEngine 2.12.0. Its forward asks the host how many tokens
came, unless it has the layout of an earlier call; its backward has that of its forward.
"""

from __future__ import annotations

from functools import cache
from importlib import util
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


def installed() -> bool:
    return all(util.find_spec(name) is not None for name in ("deep_ep", "transformer_engine"))


@cache
def _buffer(group: ProcessGroup, hidden: int) -> Any:
    """Of tokens of `hidden` bf16 numbers; cached, as Megatron-LM's is. Collective."""
    from deep_ep import Buffer

    configs = (Buffer.get_dispatch_config(group.size()), Buffer.get_combine_config(group.size()))
    size = max(config.get_nvl_buffer_size_hint(2 * hidden, group.size()) for config in configs)
    return Buffer(group, size)


class DeepEp:
    """Its layout for one choice of experts, bool `chosen` [T, experts]. Collective."""

    def __init__(
        self, group: ProcessGroup, x: Tensor, chosen: Tensor, weights: Tensor, topk: int
    ) -> None:
        self.buffer, self.experts = _buffer(group, x.shape[1]), chosen.shape[1]
        self.local = self.experts // group.size()
        wanted, index = chosen.int().topk(min(topk, self.experts), 1)
        self.index = index.masked_fill(wanted == 0, -1)
        self.layout = self._sent(x, self.of_choices(weights))[1]

    def of_choices(self, weights: Tensor) -> Tensor:
        """fp32 [T, topk], 0 where fewer experts are chosen."""
        chosen = weights.gather(1, self.index.clamp(min=0))
        return chosen.masked_fill(self.index < 0, 0.0)

    def dispatch(
        self, x: Tensor, weights: Tensor, known: bool
    ) -> tuple[Tensor, Tensor, Tensor, SimpleNamespace]:
        """Rows of local experts, in their order, the weight of each, the end of each expert's."""
        from transformer_engine.pytorch import permutation

        came, shares, layout = _Dispatch.apply(x, self.of_choices(weights), self, known)
        empty = came.new_zeros(len(came), self.local + 1, dtype=torch.float32)
        expert = layout.index.masked_fill(layout.index < 0, self.local).long()
        mask = empty.scatter(1, expert, 1.0)[:, :-1].to(torch.int32)
        table = empty.scatter(1, expert, shares)[:, :-1].contiguous()
        rows, of_rows, layout.map = permutation.moe_permute_with_probs(
            came, table, mask.contiguous(), layout.rows
        )
        layout.tokens, ends = came.shape, mask.sum(0).cumsum(0).to(torch.int32)
        return rows, of_rows, ends, layout

    def combine(self, rows: Tensor, layout: SimpleNamespace) -> Tensor:
        from transformer_engine.pytorch import permutation

        sums = permutation.moe_unpermute(rows, layout.map, restore_shape=layout.tokens)
        return _Combine.apply(sums, self, layout)

    def _sent(self, x: Tensor, shares: Tensor) -> tuple[Tensor, SimpleNamespace]:
        """What came, and its layout; the host waits."""
        per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(
            self.index, self.experts
        )
        came, index, weights, rows, handle, _ = self.buffer.dispatch(
            x, topk_idx=self.index, topk_weights=shares, num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
        )  # fmt: skip
        layout = SimpleNamespace(index=index, weights=weights, rows=sum(rows), handle=handle)
        return came, layout


class _Dispatch(torch.autograd.Function):
    """x and weights to the ranks of their experts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shares: Tensor, peer: DeepEp, known: bool):
        if known:
            layout = SimpleNamespace(**vars(peer.layout))
            came = peer.buffer.dispatch(x, handle=layout.handle)[0]
        else:
            came, layout = peer._sent(x, shares)
        ctx.peer, ctx.layout = peer, layout
        return came, layout.weights.clone(), layout

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dshares: Tensor, _: object):
        dx, dshares, _ = ctx.peer.buffer.combine(
            dx.contiguous(), ctx.layout.handle, topk_weights=dshares.float()
        )
        return dx, dshares, None, None


class _Combine(torch.autograd.Function):
    """The ranks' sums of a token, home."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, peer: DeepEp, layout: SimpleNamespace) -> Tensor:
        ctx.peer, ctx.layout = peer, layout
        return peer.buffer.combine(sums.contiguous(), layout.handle)[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor):
        return ctx.peer.buffer.dispatch(dy.contiguous(), handle=ctx.layout.handle)[0], None, None
