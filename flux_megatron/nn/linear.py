"""Tensor-parallel linear layers for plain PyTorch: `torch.nn.Linear` split over a process group.

Between a column and a row layer a rank has all tokens, and a shard of their features. Elsewhere it
has a shard of the tokens, with all features: the layout of sequence parallelism.

    x [tokens / R, ...] -> ColumnParallelLinear -> [tokens, ...] -> RowParallelLinear -> as x

The layers of these names in the root of the package are Megatron's.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter

from flux_megatron import ops
from flux_megatron.nn import functions, operators
from flux_megatron.nn.replicated import SumGradient, joined


class ParallelLinear(Module):
    """The base of both layers: parameters, their initial values, and the check of the input."""

    split: ClassVar[str]  # the size that is divided among the ranks
    dimensions: ClassVar[dict[str, int]]  # of each parameter that is divided, the dimension
    bias: Parameter | None

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *,
        group: ProcessGroup | None = None, device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        name = type(self).__name__
        group = joined(group, name)
        # the name of the group: a module that holds a group cannot be copied
        self.group_name = ops.name_of(group)
        self.world_size, self.rank = group.size(), group.rank()
        sizes = {"in_features": in_features, "out_features": out_features}
        self.in_features, self.out_features = in_features, out_features
        if sizes[self.split] < 1 or sizes[self.split] % self.world_size:
            raise ValueError(
                f"{name}: {self.split} {sizes[self.split]} given, a multiple of the group's "
                f"{self.world_size} ranks expected"
            )
        sizes[self.split] //= self.world_size
        self.in_features_local, self.out_features_local = sizes.values()
        shape = (self.out_features_local, self.in_features_local)
        self.weight = Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.register_parameter(
            "bias", Parameter(torch.empty(shape[0], device=device, dtype=dtype)) if bias else None
        )
        self.reset_parameters()

    @property
    def group(self) -> ProcessGroup:
        return ops.group_named(self.group_name)

    def shard(self, name: str, whole: Tensor) -> Tensor:
        """A view of this rank's shard of a `torch.nn.Linear`'s parameter, "weight" or "bias"."""
        if name not in self.dimensions:
            return whole
        return whole.chunk(self.world_size, self.dimensions[name])[self.rank]

    def reset_parameters(self) -> None:
        """Initialise this rank's shards as `torch.nn.Linear` does the whole parameters.

        Each rank draws the whole layer on its device and keeps its shard. So ranks in the same
        random state, as after the same `torch.manual_seed`, get the shards of one layer, and are in
        the same state afterwards. Meanwhile each rank holds the memory of the whole layer.
        """
        whole = torch.nn.Linear(
            self.in_features, self.out_features, bias=self.bias is not None,
            device=self.weight.device, dtype=self.weight.dtype,
        )  # fmt: skip
        with torch.no_grad():
            for name, parameter in self.named_parameters(recurse=False):
                parameter.copy_(self.shard(name, getattr(whole, name)))

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, rank={self.rank} of {self.world_size}"
        )

    def _check(self, x: Tensor, tokens: str) -> None:
        """Refuse x of another width on every rank; in traced code the operator does."""
        name, wrong = type(self).__name__, x.dim() < 2 or x.shape[-1] != self.in_features_local
        if wrong and not ops.is_traced(name):
            expected = f"[{tokens}, ..., {self.in_features_local}]"
            error = f"{name}: x {list(x.shape)} given, {expected} expected"
            ops.refuse(error, self.group, x.device)


class ColumnParallelLinear(ParallelLinear):
    """y = AG(x) w^T + bias: `torch.nn.Linear` whose output features are split.

    | tensor | shape on each rank (R = ranks of the group) |
    | --- | --- |
    | x | [tokens / R, ..., in_features] |
    | weight, bias | [out_features / R, in_features], [out_features / R] |
    | result | [tokens, ..., out_features / R] |

    `in_features` and `out_features` are those of the whole layer; the default `group` is the world.
    The gradients of a rank are its shards of the unsharded layer's gradients. Backward gathers x
    again for the weight's gradient.

    `ValueError`: `out_features` that R does not divide, a group without this rank, x of another
    width or dtype; `ProblemMismatch` for ranks whose x or layers differ. Under autocast operands
    are cast as for `torch.nn.Linear`.
    """

    split = "out_features"
    dimensions: ClassVar = {"weight": 0, "bias": 0}

    def forward(self, x: Tensor) -> Tensor:
        x, weight, bias = functions.autocast(x, self.weight, self.bias)
        self._check(x, "tokens / R")
        return linear_of("column", x, weight, bias, self.group_name, self.world_size)


class RowParallelLinear(ParallelLinear):
    """y = RS(x w^T) + bias: `torch.nn.Linear` whose input features are split.

    | tensor | shape on each rank (R = ranks of the group, which divides tokens) |
    | --- | --- |
    | x | [tokens, ..., in_features / R] |
    | weight, bias | [out_features, in_features / R], [out_features] |
    | result | [tokens / R, ..., out_features] |

    Every rank holds the whole bias and adds it to its own tokens. Backward sums the gradient of the
    bias over the group (`sum_gradient`), so it is the same on all ranks and needs no further sum.

    Arguments and errors are those of `ColumnParallelLinear`, with `in_features` that R divides.
    """

    split = "in_features"
    dimensions: ClassVar = {"weight": 1}

    def forward(self, x: Tensor) -> Tensor:
        x, weight, bias = functions.autocast(x, self.weight, self.bias)
        self._check(x, "tokens")
        y = linear_of("row", x, weight, None, self.group_name, self.world_size)
        return y if bias is None else y + SumGradient.apply(bias, self.group_name)


def linear_of(layer: str, x: Tensor, w: Tensor, bias: Tensor | None, name: str, R: int) -> Tensor:
    """The function of a layer that `functions` names, of a group that is known by its name and its
    R ranks: torch.compile cannot look a group up. With the group "" dx of a local layer stays this
    rank's partial sum; row and whole layers have no bias.
    """
    if ops.is_traced(f"{layer} layer"):
        return operators.linear(layer, x, w, None, name, R, bias, False)[0]
    group: Any = ops.group_named(name) if name else None
    if layer == "local":
        return functions.local_linear(x, w, bias, allreduce_group=group)
    if layer == "column":
        return functions.column_parallel_linear(x, w, bias, group=group)
    function = functions.row_parallel_linear if layer == "row" else functions.row_linear
    return function(x, w, group=group)
