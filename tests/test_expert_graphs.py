"""Layers of experts, forward and backward, that a CUDA graph has captured: exact where routes and
tokens change from replay to replay, between eager calls, with late ranks. Without a GPU a replay is
a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import test_expert_parallel as by_expert
import test_experts_once as by_rank
import torch
import torch.distributed as dist
from closeness import assert_exact
from ranks import DEVICE, be_late, on_device_ranks
from test_expert_weights import laid
from torch import Tensor

import flux_megatron
from flux_megatron.expert_parallel import activation, once, separate

TOKENS, E, N, K = 48, 3, 24, 16


def split(seed: int, ranks: int, experts: int) -> list[Tensor]:
    """Counts of each rank, which add up to its tokens whatever the seed."""
    made = torch.Generator().manual_seed(seed)
    experts_of = torch.randint(ranks * experts, (ranks, TOKENS), generator=made)
    counts = [one.bincount(minlength=ranks * experts) for one in experts_of]
    return [one.view(ranks, experts).int() for one in counts]


class Layer:
    """Of this rank, of tensors that stay where they are. Its weights' gradients are added to
    `main_grads`, which lie in reverse.
    """

    words: Sequence[str] = ()

    def __init__(self, rank: int) -> None:
        self.rank, self.ranks, self.group = rank, dist.get_world_size(), dist.group.WORLD
        self.inputs: dict[str, Tensor] = {}
        self.w, self.v = ([torch.zeros(0)] for _ in range(2))
        self.main_grads = [[*laid(torch.zeros(E, *s, device=DEVICE), True)][::-1]
                           for s in ((N, K), (K, N))]  # fmt: skip

    def put(self, **given: Tensor) -> None:
        """Into the tensors that there are, or the first ones."""
        for name, tensor in given.items():
            if name in self.inputs:
                self.inputs[name].data.copy_(tensor)
            else:
                self.inputs[name] = tensor.to(DEVICE)
        if not self.w[0].numel():
            self.w, self.v = ([one.requires_grad_() for one in self.inputs[n]] for n in "wv")
        for one in (*self.main_grads[0], *self.main_grads[1]):
            one.fill_(1.0)

    def wgrad(self, number: int) -> separate.Wgrad:
        def add(parameters, dy, x, received):
            separate.add_weight_gradients(self.main_grads[number], dy, x, received)
            return [None] * len(parameters)

        return add

    def gradients(self, y: Tensor, *of: Tensor) -> list[Tensor]:
        made = torch.autograd.grad(y, (*of, *self.w, *self.v), self.inputs["dy"], allow_unused=True)
        return [y, *made[: len(of)]]

    def results(self, made: Sequence[Tensor]) -> dict[str, Tensor]:
        grads = (torch.stack(one) - 1 for one in self.main_grads)
        return dict(zip(("y", "dx", *self.words, "dw", "dv"), (*made, *grads), strict=True))


class ByExpert(Layer):
    def load(self, seed: int) -> list[Tensor]:
        """New data; what this rank must get."""
        routing = partial(split, seed)
        given = by_expert.operands(routing, self.ranks, E, N, K, torch.bfloat16, "nt", 0)
        names = "counts", "x", "w", "v", "dy"
        self.put(**{name: getattr(given, name)[self.rank] for name in names})
        _, *right = by_expert.expected(given, "nt")
        return [one[self.rank] for one in right]

    def call(self) -> list[Tensor]:
        x, counts = self.inputs["x"].detach().requires_grad_(), self.inputs["counts"]
        hidden, _ = separate.a2a_gemm(
            x, self.w, counts, self.group, capacity=self.ranks * TOKENS, wgrad=self.wgrad(0)
        )
        y = separate.gemm_a2a(hidden, self.v, counts, self.group, tokens=TOKENS,
                              wgrad=self.wgrad(1))  # fmt: skip
        return self.gradients(y, x)


class Once(Layer):
    words = ("dweights",)

    def load(self, seed: int) -> list[Tensor]:
        router = partial(by_rank.random_choices, seed=seed)
        chosen = by_rank.all_choices(router, self.ranks, TOKENS)
        given = by_rank.operands(self.ranks, TOKENS, chosen, K, N, torch.bfloat16)
        names = "x", "w", "v", "dy", "weights"
        self.put(chosen=chosen[self.rank], **{name: given[name][self.rank] for name in names})
        y, dx, dw, dv, dweights = by_rank.expected(given, chosen, torch.bfloat16)
        return [one[self.rank] for one in (y, dx, dweights, dw, dv)]

    def call(self) -> list[Tensor]:
        x, weights = (self.inputs[name].detach().requires_grad_() for name in ("x", "weights"))
        routes, of_rows = once.route(
            self.inputs["chosen"], weights, self.group, topk=by_rank.TOPK,
            capacity=self.ranks * TOKENS * by_rank.TOPK, reverse=True,
        )  # fmt: skip
        rows = once.send(x, routes, self.group)
        w, v = self.w[::-1], self.v[::-1]
        hidden = once.multiply(rows, w, routes, self.reversed(0))
        hidden = activation.scaled(hidden, of_rows)
        y = once.multiply(hidden, v, routes, self.reversed(1))
        return self.gradients(once.give_back(y, routes, self.group), x, weights)

    def reversed(self, number: int) -> separate.Wgrad:
        """As rows lie, which are those of the last expert first."""

        def add(parameters, dy, x, received):
            separate.add_weight_gradients(self.main_grads[number][::-1], dy, x, received)
            return [None] * len(parameters)

        return add


def captured(call: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
    """Replays a call that has been made before."""
    call()
    if DEVICE == "cpu":
        return call
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()

    def replay() -> list[Tensor]:
        graph.replay()
        return results

    return replay


@pytest.mark.parametrize("kind", [ByExpert, Once])
@on_device_ranks(2)
def test_replays_between_eager_calls(rank, kind):
    layer = kind(rank)
    layer.load(0)
    replay = captured(layer.call)
    for seed in range(1, 9):
        right = layer.load(seed)
        if seed % 3 == rank:
            be_late(0.01)
        found = layer.results(layer.call() if seed == 5 else replay())
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        flux_megatron.check()
        for (word, one), wanted in zip(found.items(), right, strict=True):
            assert_exact(one, wanted.to(one.dtype), f"{kind.__name__} {word}, seed {seed}")
