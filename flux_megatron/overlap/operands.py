"""What a caller gives, as the memory that kernels and copy engines read.

The address of a wrapper is not that of its data, so whatever cannot be made plain here is refused
by its name, before a call begins. A copy is this rank's own affair: no other rank is asked.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from flux_megatron.overlap.report import note_copy
from flux_megatron.scaling import Scaling, is_fp8
from flux_megatron.symm.groups import name_of

ALIGNED = 16  # bytes of which an address is a multiple: what TMA takes


def is_plain(tensor: Tensor) -> bool:
    kind = type(tensor)
    return kind is Tensor or kind is Parameter


def no_rows(x: Tensor, w: Tensor, layout: str) -> bool:
    """Whether x has none, and is right otherwise."""
    if x.shape[0] or x.dim() != 2 or w.dim() != 2 or 0 in w.shape:
        return False
    if x.dtype != w.dtype or is_fp8(x):
        return False
    return x.shape[1] == w.shape[1 if layout == "nt" else 0]


def product(x: Tensor, w: Tensor, layout: str) -> Tensor:
    return x @ (w.t() if layout == "nt" else w)


def described(tensor: Tensor) -> str:
    """For messages."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def memory(what: str, tensor: Tensor, *, contiguous: bool = True) -> Tensor:
    """`tensor` itself, where it is dense and aligned; else what it waits for, or a copy, which is
    counted. `ValueError` names the kind of tensor that is neither.
    """
    if (
        is_plain(tensor)
        and tensor.layout is torch.strided
        and (tensor.is_contiguous() or not contiguous)
        and not tensor.is_neg()
        and tensor.data_ptr() % ALIGNED == 0
    ):
        return tensor
    return _made(what, tensor, contiguous)


def dense(scaling: Scaling | None) -> Scaling | None:
    """With blockwise scales that copy engines can read."""
    if scaling is None or not scaling.blockwise:
        return scaling
    return Scaling(memory("x_scale", scaling.x), memory("w_scale", scaling.w), *scaling[2:])


def _made(what: str, tensor: Tensor, contiguous: bool) -> Tensor:
    refuse_wrapper(what, tensor)
    plain = awaited(tensor)
    if not is_plain(plain):
        plain = plain.as_subclass(Tensor)  # it only adds to what a tensor does
    if tensor.is_neg():
        plain = plain.resolve_neg()
    if plain is not tensor:
        return memory(what, plain, contiguous=contiguous)
    if contiguous and not tensor.is_contiguous():
        note_copy(what, "its rows have gaps, or it is a transposed view")
    else:
        note_copy(what, f"its address is no multiple of {ALIGNED} bytes")
    return tensor.clone(memory_format=torch.contiguous_format)


def refuse_wrapper(what: str, tensor: Tensor) -> None:
    """`ValueError` for a tensor without memory of its own."""
    kind = type(tensor)
    if not is_plain(tensor) and _is_wrapper(tensor):
        raise ValueError(
            f"{what} of the type {kind.__module__}.{kind.__qualname__} given, a torch.Tensor "
            "expected"
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise ValueError(f"{what} with the layout {tensor.layout} given, a dense tensor expected")


def _is_wrapper(tensor: Tensor) -> bool:
    """A collective under way is none: it is awaited."""
    if type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__:
        return False
    return not _is_under_way(tensor)


def _is_under_way(tensor: Tensor) -> bool:
    functional: Any = sys.modules.get("torch.distributed._functional_collectives")
    return functional is not None and isinstance(tensor, functional.AsyncCollectiveTensor)


def awaited(tensor: Tensor) -> Tensor:
    """What a collective under way gives, for the current stream; any other tensor as it is."""
    if is_plain(tensor) or not _is_under_way(tensor):
        return tensor
    under_way: Any = tensor
    return under_way.wait()


def local(what: str, tensor: Tensor, dim: int | None, group_name: str) -> Tensor:
    """What this rank has of a DTensor that is sharded along `dim` over the group, or replicated for
    None; any other tensor as it is. Differentiable. `ValueError` for another placement.
    """
    if is_plain(tensor):
        return tensor
    dtensors: Any = sys.modules.get("torch.distributed.tensor")
    if dtensors is None or not isinstance(tensor, dtensors.DTensor):
        return tensor
    given: Any = tensor
    wanted = dtensors.Replicate() if dim is None else dtensors.Shard(dim % tensor.dim())
    mesh = given.device_mesh
    fits = mesh.ndim == 1 and name_of(mesh.get_group()) == group_name
    if not fits or given.placements != (wanted,):
        raise ValueError(
            f"{what} is a DTensor with placements {given.placements} on {mesh}, a tensor of this "
            f"rank or {wanted} over the group's ranks expected"
        )
    return given.to_local()
