"""DeepEP as a peer of layers of experts, with stand-ins of its buffer and of TransformerEngine's
permutation: ranks of the CPU have neither.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from bench_run import run_here
from ranks import DEVICE, on_cpu_ranks

from flux_megatron.lab.bench.operations import expert_layers

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="needs stand-ins")


def exchanged(tensor, sent, received):
    came = tensor.new_empty(sum(received), *tensor.shape[1:])
    dist.all_to_all_single(came, tensor.contiguous(), received, sent)
    return came


class Buffer:
    """DeepEP's, of one machine: a handle is where rows came from, and how many."""

    get_dispatch_config = get_combine_config = staticmethod(
        lambda ranks: SimpleNamespace(get_nvl_buffer_size_hint=lambda hidden, size: ranks)
    )

    def __init__(self, group, size):
        assert size == group.size()

    def get_dispatch_layout(self, index, experts):
        local = experts // dist.get_world_size()
        owner = torch.where(index < 0, -1, index // local)
        ranks = torch.arange(dist.get_world_size())
        in_rank = (owner[:, :, None] == ranks).any(1)
        per_expert = torch.bincount(index[index >= 0], minlength=experts)
        return in_rank.sum(0), None, per_expert, in_rank, None

    def dispatch(
        self, x, handle=None, topk_idx=None, topk_weights=None, num_tokens_per_rank=None,
        is_token_in_rank=None, num_tokens_per_expert=None,
    ):  # fmt: skip
        if handle is not None:
            return (
                exchanged(x[handle.tokens], handle.sent, handle.received),
                None,
                None,
                [],
                handle,
                None,
            )
        sent = num_tokens_per_rank.tolist()
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, sent)
        received = [one[dist.get_rank()] for one in every]
        to, tokens = is_token_in_rank.t().nonzero().unbind(1)
        handle = SimpleNamespace(tokens=tokens, sent=sent, received=received, T=len(x))
        local = len(num_tokens_per_expert) // len(sent)
        there = topk_idx[tokens] - (to * local)[:, None]
        mine = (topk_idx[tokens] >= 0) & (there >= 0) & (there < local)
        index = exchanged(torch.where(mine, there, -1), sent, received)
        weights = exchanged(topk_weights[tokens] * mine, sent, received)
        rows = torch.bincount(index[index >= 0], minlength=local).tolist()
        return exchanged(x[tokens], sent, received), index, weights, rows, handle, None

    def combine(self, x, handle, topk_weights=None):
        def summed(rows):
            home = exchanged(rows, handle.received, handle.sent)
            return home.new_zeros(handle.T, *rows.shape[1:]).index_add(0, handle.tokens, home)

        return summed(x), None if topk_weights is None else summed(topk_weights), None


def moe_permute_with_probs(x, probs, routing_map, num_out_tokens):
    expert, token = routing_map.t().nonzero().unbind(1)
    assert len(token) == num_out_tokens
    return x[token], probs[token, expert], token


def moe_unpermute(rows, token, restore_shape):
    return rows.new_zeros(restore_shape).index_add(0, token, rows)


@pytest.fixture
def installed(monkeypatch):
    """Stand-ins in sys.modules."""
    permutation = {
        "moe_permute_with_probs": moe_permute_with_probs, "moe_unpermute": moe_unpermute,
    }  # fmt: skip
    contents = {
        "deep_ep": {"Buffer": Buffer}, "transformer_engine": {}, "transformer_engine.pytorch": {},
        "transformer_engine.pytorch.permutation": permutation,
    }  # fmt: skip
    for name, things in contents.items():
        module = ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None), []
        vars(module).update(things)
        monkeypatch.setitem(sys.modules, name, module)
        above, _, last = name.rpartition(".")
        if above:
            setattr(sys.modules[above], last, module)


@on_cpu_ranks(2)
def test_its_rows_stand_beside_ours(rank, installed):
    rows = []
    run = run_here()
    run.row = lambda table, **values: rows.append(values)
    expert_layers.measure(run, expert_layers.SMALL[0], 2)
    forward, backward = (row["times_us"].keys() for row in rows)
    assert {"deepep", "deepep + sync"} <= forward
    assert "deepep" in backward
    assert "deepep + sync" not in backward
    assert not any(row["failures"] for row in rows)


@on_cpu_ranks(2)
def test_a_wrong_sum_of_its_has_no_times(rank, installed, monkeypatch):
    right = Buffer.combine
    monkeypatch.setattr(
        Buffer, "combine", lambda self, x, *given, **more: right(self, x + rank, *given, **more)
    )
    with pytest.raises(ArithmeticError, match=r"deepep, call 0: .*elements of y are wrong"):
        expert_layers.verify(run_here())
