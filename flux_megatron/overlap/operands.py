"""What a caller gives, as the memory that kernels and copy engines read.

The address of a wrapper is not that of its data, so whatever cannot be made plain here is refused
by its name, before a call begins. A copy is this rank's own affair: no other rank is asked.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from flux_megatron import scaling as fp8
from flux_megatron.overlap.report import note_copy
from flux_megatron.patterns import Pattern
from flux_megatron.problem import Plan
from flux_megatron.scaling import Scaling, is_fp8
from flux_megatron.symm.groups import name_of
from flux_megatron.symm.workspace import Workspace

LAYOUTS = ("nt", "nn")
SHAPES = {2: "two matrices", 3: "a matrix and one for each expert"}  # by the dimensions of w
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


def dense(scaling: Scaling | None, space: Workspace) -> Scaling | None:
    """With blockwise scales that copy engines can read."""
    if scaling is None or not scaling.blockwise:
        return scaling
    with space.guard(whole=True):  # the other ranks may be in this call already
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


def refuse_forward_mode(name: str) -> None:
    """`NotImplementedError`: torch takes the tangents of an operator's results for zero."""
    if forward_ad._current_level >= 0:
        raise NotImplementedError(
            f"{name}: forward-mode differentiation (torch.func.jvp, jacfwd, hessian) given, "
            "reverse mode (torch.func.vjp, jacrev) expected"
        )


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


def operands_error(
    x: Tensor, w: Tensor, w_dims: int, layout: str, plan: Plan | None, strategies: Collection[str],
    space: Workspace, scaling: Scaling | None = None,
) -> str | None:  # fmt: skip
    """The error in what all operations have, with the given and the expected value, or None: a plan
    for one of `strategies`, x [rows, K], and w [N, K], or [K, N] for "nn", one or one an expert.
    """
    if layout not in LAYOUTS:
        return f"layout {layout!r} given, one of {LAYOUTS} expected"
    if plan is not None and plan.strategy not in strategies:
        return f"strategy {plan.strategy!r} given, one of {[*strategies]} expected"
    if x.dim() != 2 or w.dim() != w_dims:
        wrong = f"{SHAPES[w_dims]} expected"
    elif error := fp8.error(x, w, scaling, layout):
        return error
    elif scaling is None and (not x.dtype.is_floating_point or w.dtype != x.dtype):
        wrong = "one floating-point dtype expected"
    elif w.device != x.device:
        wrong = "one device expected"
    elif x.device != space.device:
        return f"x {described(x)} given, {space.device} expected, where the group's first call was"
    elif x.shape[1] != w.shape[-1 if layout == "nt" else -2]:
        wrong = f"equal K expected for layout {layout!r}"
    elif 0 in w.shape:
        wrong = "no empty dimension expected"
    else:
        return None
    return f"x {described(x)} and w {described(w)} given, {wrong}"


def linear_error(
    pattern: Pattern, x: Tensor, w: Tensor, bias: Tensor | None, space: Workspace, layout: str,
    plan: Plan | None, strategies: Collection[str], scaling: Scaling | None,
) -> str | None:  # fmt: skip
    """The error in this rank's arguments, with the given and the expected value, or None."""
    if error := operands_error(x, w, 2, layout, plan, strategies, space, scaling):
        return error
    if error := rows_error(pattern, x, space):
        return error
    dtype = fp8.result_dtype(x, scaling)
    outer = w.shape[0 if layout == "nt" else 1]
    if bias is not None and (bias.shape != (outer,) or bias.dtype != dtype):
        return f"bias {described(bias)} given, [{outer}] {dtype} expected"
    if bias is not None and bias.device != x.device:
        return f"bias {described(bias)} given, {x.device} expected"
    return None


def rows_error(pattern: Pattern, x: Tensor, space: Workspace) -> str | None:
    """What of it depends on the rows of x alone."""
    if not len(x):
        return f"x {described(x)} given, no empty dimension expected"
    if pattern.spec.scatters and len(x) % space.world_size:
        ranks = f"the group's {space.world_size} ranks"
        return f"x {described(x)} given, rows divisible by {ranks} expected"
    return None
