"""The state of a model with parallel layers, for `torch.distributed.checkpoint`."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DeviceMesh, DTensor, Placement, Replicate, Shard
from torch.nn import Module

from flux_megatron import ops
from flux_megatron.nn.embedding import ShardedEmbeddingBag
from flux_megatron.nn.linear import ParallelLinear


def sharded_state_dict(model: Module) -> dict[str, Tensor]:
    """`model.state_dict()` with the parameters of parallel layers and the tables of embedding bags
    as DTensors of the whole.

    A DTensor shares the memory of its parameter. `torch.distributed.checkpoint` writes and reads
    such a dict, with any number of ranks. `full_tensor()`, a collective of the layer's group, gives
    a whole parameter. All other entries, equal on all ranks, are those of `state_dict()`.

    `ValueError` for a layer whose parameters are not in the state, as under `weight_norm`, and for
    a bag whose tables torch would divide otherwise; on every rank, with the layer's name.
    """
    state, kept = model.state_dict(), model.state_dict(keep_vars=True)
    keys = defaultdict(list)  # by identity: a shared layer has several, wrappers change a path
    for key, value in kept.items():
        keys[id(value)].append(key)
    for path, layer in model.named_modules():
        if not isinstance(layer, (ParallelLinear, ShardedEmbeddingBag)):
            continue
        where = f"sharded_state_dict: {type(layer).__name__} {path!r}"
        for name, placement, whole in _divided(layer, where):
            parameter = getattr(layer, name)
            if id(parameter) not in keys:
                raise ValueError(
                    f"{where} given whose {name} is made of other parameters, as by weight_norm, "
                    "one whose parameters are in state_dict() expected"
                )
            mesh = DeviceMesh.from_group(ops.group_named(layer.group_name), parameter.device.type)
            for key in keys[id(parameter)]:
                state[key] = DTensor.from_local(
                    state[key], mesh, [placement], run_check=False, **whole
                )
    return state


def _divided(
    layer: ParallelLinear | ShardedEmbeddingBag, where: str
) -> list[tuple[str, Placement, dict[str, Any]]]:
    """Names of parameters, their placements, and the sizes of a whole whose parts are unequal."""
    if isinstance(layer, ShardedEmbeddingBag):
        return [("weight", Shard(0), _all_tables(layer, where))]
    names = ("weight",) if layer.bias is None else ("weight", "bias")
    splits = [layer.dimensions.get(name) for name in names]
    placements = [Replicate() if split is None else Shard(split) for split in splits]
    return [(name, one, {}) for name, one in zip(names, placements, strict=True)]


def _all_tables(bag: ShardedEmbeddingBag, where: str) -> dict[str, Any]:
    """`ValueError` for tables that torch, which divides by rounding up, has on other ranks."""
    total, R = sum(bag.tables), len(bag.tables)
    by_torch = tuple(len(part) for part in torch.arange(total).chunk(R))
    if by_torch != bag.tables:
        raise ValueError(
            f"{where} with {bag.tables} tables on the ranks given, {by_torch} expected, as torch "
            f"divides {total}"
        )
    shape = torch.Size((total, *bag.weight.shape[1:]))
    return {"shape": shape, "stride": bag.weight.stride()}
