"""The state of a model for checkpoints: whole tensors, of which each rank holds its shard."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module

from flux_megatron.nn.linear import ParallelLinear


def sharded_state_dict(model: Module) -> dict[str, Tensor]:
    """`model.state_dict()` with the parameters of parallel layers as DTensors of the whole layer.

    A DTensor shares the memory of its parameter. `torch.distributed.checkpoint` writes and reads
    such a dict, with any number of ranks. `full_tensor()`, a collective of the layer's group, gives
    a whole parameter. All other entries, equal on all ranks, are those of `state_dict()`.
    """
    from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard

    state = model.state_dict()
    for path, layer in model.named_modules():
        if not isinstance(layer, ParallelLinear):
            continue
        mesh = DeviceMesh.from_group(layer.group, layer.weight.device.type)
        for name, _ in layer.named_parameters(recurse=False):
            split = layer.dimensions.get(name)
            key = f"{path}.{name}" if path else name
            placement = Replicate() if split is None else Shard(split)
            state[key] = DTensor.from_local(state[key], mesh, [placement], run_check=False)
    return state
