"""Megatron whose groups are a framework's: nameless, and made anew between two steps."""

from __future__ import annotations

import functools
from typing import Any

import post_training as post
import pytest
import side_by_side as sbs
import torch
import torch.distributed as dist
from ranks import FUSED, on_cpu_ranks
from wrapped_groups import Reloadable

import flux_megatron
from flux_megatron.symm.workspaces import workspaces

# of torch.distributed, those that such a framework replaces and Megatron calls
REPLACED = (
    "get_rank", "get_world_size", "get_backend", "get_global_rank", "get_group_rank",
    "get_process_group_ranks", "all_reduce", "all_gather", "all_gather_into_tensor", "broadcast",
    "reduce_scatter_tensor", "barrier", "all_gather_object",
)  # fmt: skip
made: list[Reloadable] = []


def of_inside(function: Any) -> Any:
    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        def inside(one: Any) -> Any:
            return one.group if isinstance(one, Reloadable) else one

        return function(*map(inside, given), **{name: inside(one) for name, one in named.items()})

    return call


def replace_new_group() -> None:
    original = dist.new_group

    def new_group(ranks: Any = None, *given: Any, **named: Any) -> Any:
        if ranks is not None and (len(ranks) < 2 or dist.get_rank() not in ranks):
            return original(ranks, *given, **named)
        made.append(Reloadable(lambda: original(ranks, *given, **named)))
        return made[-1]

    dist.new_group = new_group
    for name in REPLACED:
        setattr(dist, name, of_inside(getattr(dist, name)))


@pytest.mark.parametrize("way", ["enable", "replace"])
@pytest.mark.parametrize("sp", [True, False], ids=["sp", "no sp"])
@on_cpu_ranks(2, environment=FUSED)
def test_steps_between_which_all_groups_are_made_anew(rank, sp, way):
    replace_new_group()
    sbs.start(2)

    def life(model: Any) -> list[torch.Tensor]:
        seen = []
        for _ in range(2):
            seen += [post.log_probs(model, (3, 3), 1), *post.learn(model, post.EVEN)]
            for one in made:
                one.destroy()
            for one in made:
                one.reload()
        return seen

    with post.attention_of_sequences:
        expected = life(post.with_our_norms(sp))
        model = sbs.with_ours(way, lambda: post.with_our_norms(sp))
        assert sbs.ours(model) == sbs.ALL
        flux_megatron.reset_report()
        torch.testing.assert_close(life(model), expected, rtol=0, atol=post.BOUND)
    sbs.overlapped()
    assert len(workspaces()) == 1
