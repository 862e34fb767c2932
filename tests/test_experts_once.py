"""Tokens that travel once to a rank: exact against the reference, forward and backward, for all
kinds of choices, and refused by name on every rank where rows do not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from closeness import assert_exact, small_integers
from ranks import DEVICE, on_device, on_device_ranks
from torch import Tensor

import flux_megatron
from flux_megatron import errors
from flux_megatron.expert_parallel import activation, once
from flux_megatron.lab import reference

E, TOPK = 3, 3
Choices = Callable[[int, int], Tensor]  # of (rank, tokens): bool [tokens, R E]


def random_choices(rank: int, tokens: int, ranks: int, k: int = TOPK, seed: int = 0) -> Tensor:
    made = torch.Generator().manual_seed(10 * seed + rank)
    ranked = torch.rand(tokens, ranks * E, generator=made).argsort(1).argsort(1)
    return ranked < k


def one_expert(rank: int, tokens: int, ranks: int, expert: int = 0) -> Tensor:
    chosen = torch.zeros(tokens, ranks * E, dtype=torch.bool)
    chosen[:, expert] = True
    return chosen


def nobody_to_a_rank(rank: int, tokens: int, ranks: int, whom: int = 0) -> Tensor:
    chosen = random_choices(rank, tokens, ranks)
    chosen[:, whom * E : (whom + 1) * E] = False
    return chosen


def dropped(rank: int, tokens: int, ranks: int) -> Tensor:
    """Some tokens have fewer experts, some none."""
    chosen = random_choices(rank, tokens, ranks)
    chosen[::3] = False
    chosen[1::4, ::2] = False
    return chosen


def nothing(rank: int, tokens: int, ranks: int) -> Tensor:
    return torch.zeros(tokens, ranks * E, dtype=torch.bool)


ROUTERS = {
    "random": random_choices,
    "one expert": one_expert,
    "the last expert": partial(one_expert, expert=-1),
    "nobody to rank 0": nobody_to_a_rank,
    "nobody to rank 1": partial(nobody_to_a_rank, whom=1),
    "dropped": dropped,
    "nothing": nothing,
    "one each": partial(random_choices, k=1),
}


def all_choices(router: Choices, ranks: int, tokens: int) -> list[Tensor]:
    return [router(rank, tokens, ranks) for rank in range(ranks)]


def operands(ranks: int, tokens: int, chosen: list[Tensor], K: int, N: int, dtype) -> dict:
    made = torch.Generator().manual_seed(tokens)
    integers = partial(small_integers, dtype=dtype, generator=made, kept=0.5)
    weights = [small_integers(one.shape, torch.float32, made, 2) for one in chosen]
    return {
        "x": [integers((tokens, K)) for _ in chosen], "dy": [integers((tokens, K)) for _ in chosen],
        "weights": weights, "w": [integers((E, N, K)) for _ in chosen],
        "v": [integers((E, K, N)) for _ in chosen],
    }  # fmt: skip


def leaf(one: Tensor) -> Tensor:
    return one.detach().clone().requires_grad_()


def expected(given: dict, chosen: list[Tensor], dtype) -> list[list[Tensor]]:
    """y and the gradients of x, weights, w and v, by autograd of the reference in fp64."""
    x, weights, w, v = (
        [leaf(one.double()) for one in given[n]] for n in ("x", "weights", "w", "v")
    )
    rows = reference.send_tokens(x, chosen)
    of_rows = reference.weights_of_rows(weights, chosen)
    made = []
    for rank, mine in enumerate(rows):
        sizes = [int(sum(one[:, rank * E + e].sum() for one in chosen)) for e in range(E)]
        hidden = [p @ m.t() for p, m in zip(mine.split(sizes), w[rank], strict=True)]
        weighted = torch.cat(hidden) * of_rows[rank][:, None]
        made.append(torch.cat(
            [p @ m.t() for p, m in zip(weighted.split(sizes), v[rank], strict=True)]
        ))  # fmt: skip
    y = reference.give_back_tokens(made, chosen)
    torch.autograd.backward(y, [one.double() for one in given["dy"]])
    found = [y, *([one.grad if one.grad is not None else torch.zeros_like(one) for one in leaves]
                  for leaves in (x, w, v))]  # fmt: skip
    return [[one.detach().to(dtype) for one in t] for t in found] + [
        [(torch.zeros_like(one) if one.grad is None else one.grad).float() for one in weights]
    ]


def layer(rank: int, given: dict, chosen: Tensor, capacity: int, reverse: bool) -> list[Tensor]:
    """y and the gradients, of one rank."""
    group, order = dist.group.WORLD, -1 if reverse else 1
    x, weights = (leaf(given[name][rank].to(DEVICE)) for name in ("x", "weights"))
    w, v = ([leaf(one) for one in given[name][rank].to(DEVICE)] for name in ("w", "v"))
    routes, of_rows = once.route(
        chosen.to(DEVICE), weights, group, topk=TOPK, capacity=capacity, reverse=reverse
    )
    rows = once.send(x, routes, group)
    hidden = once.multiply(rows, w[::order], routes)
    made = once.multiply(activation.scaled(hidden, of_rows), v[::order], routes)
    y = once.give_back(made, routes, group)
    y.backward(given["dy"][rank].to(DEVICE))
    dw, dv = (torch.stack([one.grad for one in t]) for t in (w, v))
    return [y, x.grad, dw, dv, weights.grad]


def layers(rank: int, names: list[str], tokens: int, K: int, N: int) -> None:
    ranks = dist.get_world_size()
    for number, name in enumerate(names):
        dtype = (torch.float32, torch.bfloat16)[number % 2 if DEVICE == "cpu" else 1]
        chosen = all_choices(ROUTERS[name], ranks, tokens)
        given = operands(ranks, tokens, chosen, K, N, dtype)
        most = max(
            1, *(int(sum(c[:, r * E : r * E + E].sum() for c in chosen)) for r in range(ranks))
        )
        got = layer(rank, given, chosen[rank], most + number % 2 * 7, reverse=number % 3 == 1)
        words = "y", "dx", "dw", "dv", "dweights"
        for word, one, right in zip(words, got, expected(given, chosen, dtype), strict=True):
            assert_exact(one, right[rank], f"{name} {word} {dtype}")


@pytest.mark.parametrize(("ranks", "tokens"), [(2, 40), (2, 1), (3, 17), (1, 20)])
def test_every_router(ranks, tokens):
    on_device(layers, ranks, list(ROUTERS), tokens, 16, 8)


def test_many_tokens_share_signals():
    """More tiles of tokens than slots, and several columns of tiles."""
    on_device(layers, 2, ["random", "dropped"], 16 * 64 + 40, 520, 8, limit_s=300)


@on_device_ranks(2)
def test_memory_is_given_back_before_backward(rank):
    chosen = all_choices(random_choices, 2, 20)
    given = operands(2, 20, chosen, 16, 8, torch.bfloat16)
    group, x = dist.group.WORLD, leaf(given["x"][rank].to(DEVICE))
    mine, weights = (one[rank].to(DEVICE) for one in (chosen, given["weights"]))
    routes, _ = once.route(mine, weights, group, topk=TOPK, capacity=200)
    y = once.give_back(once.send(x, routes, group), routes, group)
    flux_megatron.release()
    (y * given["dy"][rank].to(DEVICE)).sum().backward()
    times = chosen[rank].sum(1, keepdim=True)
    assert_exact(x.grad, (given["dy"][rank] * times).to(x.dtype))


@pytest.mark.parametrize(("topk", "capacity", "message"), [
    (2, 500, "chosen 3 experts, at most 2"), (3, 20, "receives .* at most 20"),
])  # fmt: skip
@on_device_ranks(2)
def test_what_does_not_fit_is_refused(rank, topk, capacity, message):
    chosen = random_choices(rank, 20, 2).to(DEVICE)
    weights = torch.ones(chosen.shape, device=DEVICE)

    def route() -> None:
        once.route(chosen, weights, dist.group.WORLD, topk=topk, capacity=capacity)
        flux_megatron.synchronize()  # on GPUs only the device knows

    with pytest.raises(errors.CapacityExceeded, match=message):
        route()
