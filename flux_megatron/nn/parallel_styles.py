"""Styles for `torch.distributed.tensor.parallel.parallelize_module`: in place of PyTorch's
`ColwiseParallel` and `RowwiseParallel`, with the same options, parameters and results.

| style | input | output | forward, backward |
| --- | --- | --- | --- |
| `FluxColwiseParallel` | `Shard(d)` of tokens | `Shard(-1)` | AG+GEMM, GEMM+RS |
| | `Replicate()` | `Shard(-1)` | local, GEMM+AR |
| `FluxRowwiseParallel` | `Shard(-1)` | `Shard(d)` of tokens | GEMM+RS, AG+GEMM |
| | `Shard(-1)` | `Replicate()` | GEMM+AR, local |

Weights become DTensors, as PyTorch's styles make them. A dimension d other than the first comes
first in the memory of the results, so between the layers no tensor of all tokens is copied.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle

from flux_megatron import ops
from flux_megatron.nn.functions import autocast
from flux_megatron.nn.linear import linear_of
from flux_megatron.nn.replicated import SumGradient


class _FluxParallel(ParallelStyle):
    """What both styles share: options, and a `torch.nn.Linear` that gets sharded parameters."""

    split: ClassVar[str]  # the size of the layer that is divided among the ranks
    placements: ClassVar[dict[str, Placement]]
    layouts: ClassVar[tuple[Placement, Placement]]  # of input and output, where none is given
    kind: ClassVar[type[_Linear]]

    def __init__(
        self, *, input_layouts: Placement | None = None, output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.input_layout = input_layouts or self.layouts[0]
        self.output_layout = output_layouts or self.layouts[1]
        self.use_local_output = use_local_output
        self._check()

    def _check(self) -> None:
        raise NotImplementedError

    def why_not(self, module: nn.Module, device_mesh: DeviceMesh) -> str | None:
        """Why this style is none for the module over the mesh, or None."""
        name = type(self).__name__
        plain = getattr(module.forward, "__func__", None) is nn.Linear.forward
        if not plain or "weight" not in module._parameters:
            return (
                f"{name}: {type(module).__name__} given, torch.nn.Linear expected, or a subclass "
                "that leaves its forward and its weight"
            )
        if device_mesh.ndim != 1:
            return f"{name}: {device_mesh} given, a mesh of one dimension expected, as mesh['tp']"
        size, R = getattr(module, self.split), device_mesh.size()
        if size % R:
            return f"{name}: {self.split} {size} given, a multiple of the mesh's {R} ranks expected"
        return None

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if reason := self.why_not(module, device_mesh):
            raise ValueError(reason)
        for key, parameter in [*module.named_parameters(recurse=False)]:
            whole, placement = parameter.detach(), [self.placements[key]]
            sharded = distribute_tensor(
                whole, device_mesh, placement, src_data_rank=self.src_data_rank
            )
            module.register_parameter(
                key, nn.Parameter(sharded, requires_grad=parameter.requires_grad)
            )
        return self.adopt(module, device_mesh)

    def adopt(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Our forward for a `torch.nn.Linear` whose parameters are, or will be, DTensors with
        `placements`.
        """
        given: Any = type(module)
        kind: Any = self.kind
        module.__class__ = _with_methods_of(given, kind)
        assert isinstance(module, _Linear)
        module.style, module.mesh = self, device_mesh
        module.group_name = ops.name_of(device_mesh.get_group())
        module.world_size = device_mesh.size()
        return module

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layout}, "
            f"output_layouts={self.output_layout}, use_local_output={self.use_local_output})"
        )


class _Linear(nn.Linear):
    """A parallelized `torch.nn.Linear`."""

    style: _FluxParallel
    mesh: DeviceMesh
    group_name: str
    world_size: int

    def _operands(self, x: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """The local x, weight and bias, in the dtype that autocast wants."""
        if isinstance(x, DTensor):
            x = self._local(x)
        weight: Any = self.weight
        bias: Any = self.bias
        return autocast(x, weight.to_local(), None if bias is None else bias.to_local())

    def _local(self, x: DTensor) -> Tensor:
        """The gradient of a replicated DTensor is summed by DTensor, where it needs the sum."""
        wanted = _positive(self.style.input_layout, x.dim())
        if x.placements != (wanted,):
            raise ValueError(
                f"{self.style}: an input with placements {x.placements} given, {(wanted,)} expected"
            )
        return x.to_local(grad_placements=[Partial() if wanted.is_replicate() else wanted])

    def _result(self, y: Tensor, made: Placement) -> Any:
        """y, whose placement is `made`, as the style wants it."""
        wanted = _positive(self.style.output_layout, y.dim())
        if self.style.use_local_output and made == wanted:
            return y
        result = DTensor.from_local(y, self.mesh, [made], run_check=False)
        if made != wanted:
            result = result.redistribute(placements=[wanted])
        return result.to_local() if self.style.use_local_output else result


@functools.cache
def _with_methods_of(given: type[nn.Module], kind: type[_Linear]) -> type[_Linear]:
    """`kind`, with what a subclass of torch.nn.Linear adds: frameworks look for it."""
    return kind if given is nn.Linear else type(given.__name__, (kind, given), {})


class _Colwise(_Linear):
    def forward(self, x: Any) -> Any:
        summed = isinstance(x, DTensor)
        x, w, bias = self._operands(x)
        name, R, layout = self.group_name, self.world_size, self.style.input_layout
        if isinstance(layout, Shard):
            d = _dimension(self.style, layout, x)
            y = linear_of("column", x.movedim(d, 0), w, bias, name, R).movedim(0, d)
        else:
            y = linear_of("local", x, w, bias, "" if summed else name, R)
        return self._result(y, Shard(y.dim() - 1))


class _Rowwise(_Linear):
    def forward(self, x: Any) -> Any:
        x, w, bias = self._operands(x)
        name, R, layout = self.group_name, self.world_size, self.style.output_layout
        if isinstance(layout, Shard):
            d = _dimension(self.style, layout, x)
            y = linear_of("row", x.movedim(d, 0), w, None, name, R).movedim(0, d)
            bias = None if bias is None else SumGradient.apply(bias, name)
        else:
            y = linear_of("whole", x, w, None, name, R)
        return self._result(y if bias is None else y + bias, _positive(layout, y.dim()))


class FluxColwiseParallel(_FluxParallel):
    """PyTorch's `ColwiseParallel` for `torch.nn.Linear`, with its communication hidden. A subclass
    that leaves `forward` and `weight` is one.

    `input_layouts` is `Replicate()`, the default, or the `Shard` of a dimension of tokens;
    `output_layouts` is any placement, by default `Shard(-1)`, which alone needs no further
    communication. A DTensor that comes in has the placement of `input_layouts`. Each style gathers
    its own input: give layers of the same input one weight.

    `ValueError` for another module, mesh or layout, or `out_features` that the ranks do not divide.
    """

    split, kind = "out_features", _Colwise
    placements: ClassVar = {"weight": Shard(0), "bias": Shard(0)}
    layouts: ClassVar = (Replicate(), Shard(-1))

    def _check(self) -> None:
        given = self.input_layout
        _expect(self, "input_layouts", given, isinstance(given, (Shard, Replicate)))


class FluxRowwiseParallel(_FluxParallel):
    """PyTorch's `RowwiseParallel` for `torch.nn.Linear`, with its communication hidden.

    `input_layouts` is `Shard(-1)`; `output_layouts` is `Replicate()`, the default, or the `Shard`
    of a dimension of tokens, whose size the ranks divide.

    `ValueError` for another module, mesh or layout, or `in_features` that the ranks do not divide.
    """

    split, kind = "in_features", _Rowwise
    placements: ClassVar = {"weight": Shard(1), "bias": Replicate()}
    layouts: ClassVar = (Shard(-1), Replicate())

    def _check(self) -> None:
        given, result = self.input_layout, self.output_layout
        _expect(self, "input_layouts", given, given == Shard(-1), "Shard(-1)")
        _expect(self, "output_layouts", result, isinstance(result, (Shard, Replicate)))


def _expect(
    style: ParallelStyle, option: str, given: Placement, good: bool,
    expected: str = "Replicate() or Shard",
) -> None:  # fmt: skip
    if not good:
        raise ValueError(f"{type(style).__name__}: {option} {given} given, {expected} expected")


def _positive(placement: Placement, dimensions: int) -> Placement:
    if isinstance(placement, Shard) and placement.dim < 0:
        return Shard(placement.dim + dimensions)
    return placement


def _dimension(style: ParallelStyle, layout: Shard, x: Tensor) -> int:
    """The dimension of tokens that is sharded."""
    d = layout.dim + x.dim() if layout.dim < 0 else layout.dim
    if not 0 <= d < x.dim() - 1:
        raise ValueError(
            f"{style}: x {list(x.shape)} given, more dimensions expected: {layout} shards tokens"
        )
    return d
