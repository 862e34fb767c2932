"""States of models for checkpoints: every name of a parallel layer has its shards, or an error."""

import re

import pytest
import torch
from closeness import assert_exact
from ranks import DEVICE, on_device, on_device_ranks
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations

from flux_megatron.nn import ColumnParallelLinear, ShardedEmbeddingBag, sharded_state_dict


@on_device_ranks(2)
def test_every_name_of_a_layer_has_its_shards(rank):
    shared, wrapped = (ColumnParallelLinear(4, 4, device=DEVICE) for _ in range(2))
    model = nn.ModuleDict({"a": shared, "b": shared, "c": checkpoint_wrapper(wrapped)})
    state = sharded_state_dict(model)
    assert state.keys() == model.state_dict().keys()
    for key, value in state.items():
        layer = wrapped if key.startswith("c") else shared
        local = getattr(layer, key.rpartition(".")[2])
        assert value.shape[0] == 4, key
        assert_exact(value.to_local(), local.detach(), key)
        assert value.to_local().data_ptr() == local.data_ptr(), key


@on_device_ranks(2)
def test_a_layer_whose_parameters_are_made_of_others_is_refused_by_name(rank):
    layer = parametrizations.weight_norm(ColumnParallelLinear(4, 4, device=DEVICE))
    with pytest.raises(ValueError, match="ColumnParallelLinear '0' given whose weight is made of"):
        sharded_state_dict(nn.Sequential(layer))


def bag(tables: int) -> ShardedEmbeddingBag:
    torch.manual_seed(0)
    return ShardedEmbeddingBag(tables, 3, 2, device=DEVICE)


def save(rank: int, folder: str) -> None:
    checkpoint.save(sharded_state_dict(bag(5)), checkpoint_id=folder)


def load(rank: int, folder: str) -> None:
    expected, read = bag(5), bag(5)
    nn.init.zeros_(read.weight)
    checkpoint.load(sharded_state_dict(read), checkpoint_id=folder)
    assert_exact(read.weight.detach(), expected.weight.detach())
    assert sharded_state_dict(read)["weight"].full_tensor().shape == (5, 3, 2)
    said = "sharded_state_dict: ShardedEmbeddingBag '' with (2, 1, 1) tables on the ranks given, "
    with pytest.raises(ValueError, match=re.escape(said + "(2, 2) expected, as torch divides 4")):
        sharded_state_dict(bag(4))


def test_tables_of_a_bag_are_written_and_read_by_other_ranks(tmp_path):
    on_device(save, 2, str(tmp_path))
    on_device(load, 3, str(tmp_path))
