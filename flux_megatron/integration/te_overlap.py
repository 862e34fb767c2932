"""TransformerEngine's own layers with our operations in place of its userbuffers: FP8 training.

TE's Linear and LayerNormLinear ask `get_ub(name)` for an object that overlaps a GEMM with its
communication, and give it to `general_gemm`. `name_for` puts ours in both places, for layers whose
attributes ask (`fp8.asking`). Recipes, quantizers, amax, cached weights and their transposes stay
TE's; we move the bytes and multiply.

    column  forward AG+GEMM of x; backward GEMM+RS of dx, beside a gather of x by copy engines
    row     forward GEMM+RS of y; backward AG+GEMM of dy, whose gathered rows TE's wgrad reads

TE pushes x and dy in FP8 where ranks have one scale: it reduces their amax over the group before.
Blockwise scales travel with their rows (`te_communicators`).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch.distributed as dist
import transformer_engine_torch as tex
from torch import Tensor
from torch.distributed import ProcessGroup
from transformer_engine.pytorch.module import base, linear

from flux_megatron import ops
from flux_megatron.integration import arm, coverage, te_communicators
from flux_megatron.integration.replaced import put, put_everywhere
from flux_megatron.integration.te_communicators import Communicator, Communicators
from flux_megatron.scaling import BLOCK, E4M3, E5M2, Scaling, scales_of

_DTYPES = {tex.DType.kFloat8E4M3: E4M3, tex.DType.kFloat8E5M2: E5M2}
_FLAGS = (
    "ub_overlap_ag_fprop", "ub_overlap_rs_fprop", "ub_overlap_ag_dgrad", "ub_overlap_rs_dgrad"
)  # fmt: skip
_ROWS = 16  # of FP8 on a rank: as many do in every GEMM of forward and backward
_general_gemm = linear.general_gemm
_assert_dim_for_fp8_exec = linear.assert_dim_for_fp8_exec


def general_gemm(
    A: Any, B: Any, *arguments: Any, ub: Any = None, ub_type: Any = None, extra_output: Any = None,
    **options: Any,
) -> Any:  # fmt: skip
    """TE's, with a `Communicator` for `ub` an operation of ours: B @ A.T ("TN") or B @ A ("NN")."""
    if not isinstance(ub, Communicator):
        return _general_gemm(
            A, B, *arguments, ub=ub, ub_type=ub_type, extra_output=extra_output, **options
        )
    assert not arguments, f"{arguments} given by place, names expected"
    gathers = ub_type == tex.CommOverlapType.AG
    if reason := _unsupported(A, B, ub.group.size(), options):
        ops.note_fallback("ag_gemm" if gathers else "gemm_rs", reason)
        return _serial(A, B, ub, gathers, extra_output, options)
    layout = options.get("layout", "TN")
    w, of_w = _operand(A, transposed=layout == "NN")
    rows, of_x = _operand(B)
    blocks = _in_blocks(B)
    given: dict[str, Any] = {"layout": "nt" if layout == "TN" or of_w is not None else "nn"}
    if of_x is not None and of_w is not None:
        split = blocks or options.get("use_split_accumulator", False)
        given["scaling"] = Scaling(of_x, of_w, options["out_dtype"], split, blocks)
    if not gathers:
        y = ops.run_gemm_rs(rows.flatten(0, -2), w, ub.group, **given).view_as(extra_output)
        return y, None, None, y
    shard = ub.taken().view(rows.dtype).flatten(0, -2)
    kept = options.get("grad") and not blocks
    consume = functools.partial(te_communicators.keep, B) if kept else None
    y = ops.run_ag_gemm(shard, w, options.get("bias"), ub.group, consume=consume, **given)
    ub.give_columnwise(B)
    return y.view(*B.size()[:-1], -1), None, None, None


def _operand(tensor: Any, transposed: bool = False) -> tuple[Tensor, Tensor | None]:
    """Its elements, and the scales of FP8 ones. These lie along K: `transposed`, its transpose."""
    if not _is_fp8(tensor):
        return tensor, None
    data = _stored(tensor, transposed).view(_DTYPES[tensor._fp8_dtype])
    if _in_blocks(tensor):
        return data, tensor._columnwise_scale_inv if transposed else tensor._rowwise_scale_inv
    return data, tensor._scale_inv


def _stored(tensor: Any, transposed: bool) -> Any:
    """The bytes, None where TE has none of that kind: of a weight that is a parameter the optimizer
    may have changed them since they were transposed.
    """
    if _in_blocks(tensor):
        return tensor._columnwise_data if transposed else tensor._rowwise_data
    if not transposed:
        return tensor._data
    return None if tensor._transpose_invalid else tensor._transpose


def _is_fp8(tensor: Any) -> bool:
    return isinstance(tensor, base.Float8TensorStorage) or _in_blocks(tensor)


def _in_blocks(tensor: Any) -> bool:
    """Whether it is FP8 with blockwise scales."""
    return isinstance(tensor, base.Float8BlockwiseQTensorStorage)


def _unsupported(A: Any, B: Any, ranks: int, options: dict[str, Any]) -> str | None:
    """What we do not compute of a GEMM with communication, or None."""
    for name in ("quantization_params", "gelu", "accumulate", "out", "bulk_overlap"):
        if options.get(name) not in (None, False):
            return f"TransformerEngine asks for {name}"
    quantized = _is_fp8(A) and _is_fp8(B) and _in_blocks(A) == _in_blocks(B)
    if not quantized and not (ops.is_plain(A) and ops.is_plain(B)):
        return f"{type(A).__name__} times {type(B).__name__}"
    if _is_fp8(A) and _DTYPES.get(A._fp8_dtype) is not E4M3:
        return f"a weight in {A._fp8_dtype}"
    if _is_fp8(A) and _stored(A, options.get("layout") == "NN") is None:
        return "TransformerEngine has no transpose of the weight"
    return _blocks_unsupported(A, B, ranks) if _in_blocks(A) else None


def _blocks_unsupported(A: Any, B: Any, ranks: int) -> str | None:
    if not A._is_2D_scaled or B._is_2D_scaled:
        return "a recipe with blocks of another shape than 1 x 128 and, of weights, 128 x 128"
    *rows, K = B.size()
    return ops.blocks_refused(B._rowwise_data.device, math.prod(rows) // ranks, K)


def _serial(
    A: Any, B: Any, ub: Communicator, gathers: bool, scattered: Any, options: dict[str, Any]
) -> Any:
    """The same by NCCL and TE's GEMM."""
    if gathers:
        shard = ub.taken().contiguous()
        whole = _gathered(shard, ub.group)
        if isinstance(B, Tensor):
            B.copy_(whole)
        elif _in_blocks(B):
            *rows, K = shard.shape
            scales = _gathered(B._rowwise_scale_inv, ub.group)
            B._rowwise_scale_inv = scales_of(scales, K, math.prod(rows))
            B._rowwise_data = whole
            ub.give_columnwise(B)
        else:
            B._data = whole
        return _general_gemm(A, B, **options)
    y = _general_gemm(A, B, **options)[0]
    dist.reduce_scatter_tensor(scattered, y.view(-1, *scattered.shape[1:]), group=ub.group)
    return y, None, None, scattered


def _gathered(shard: Tensor, group: ProcessGroup) -> Tensor:
    whole = shard.new_empty(group.size() * shard.shape[0], *shard.shape[1:])
    dist.all_gather_into_tensor(whole, shard, group=group)
    return whole


class _Flag:
    """An attribute that asks for overlap, as TE's modules set it: not in force where we have none,
    and in the stock arm of a comparison.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        return self if module is None else self.asked(module) and _in_force()

    def __set__(self, module: Any, value: bool) -> None:
        module.__dict__[self._name] = value

    def asked(self, module: Any) -> bool:
        return bool(module.__dict__.get(self._name))


def _in_force() -> bool:
    """Not in the stock arm of a comparison, nor with recipes that we do not know."""
    manager = base.FP8GlobalStateManager
    if arm.stock_now() or not manager.is_fp8_enabled():
        return not arm.stock_now()
    recipe = manager.get_fp8_recipe()
    known = recipe.delayed() or recipe.float8_current_scaling() or recipe.float8_block_scaling()
    return bool(known)


def assert_dim_for_fp8_exec(x: Any, *weights: Any) -> None:
    """TE's, before a layer's first communication, with the number of rows that would do."""
    try:
        _assert_dim_for_fp8_exec(x, *weights)
    except AssertionError as error:
        rows = math.prod(x.shape[:-1])
        blocks = base.FP8GlobalStateManager.get_fp8_recipe().float8_block_scaling()
        multiple = BLOCK if blocks else _ROWS
        whole = -(-rows // multiple) * multiple
        raise ValueError(
            f"{rows} rows of FP8 on a rank given, a multiple of {multiple} expected: pad packed "
            f"sequences, here to {whole} rows on each tensor-parallel rank ({error})"
        ) from None


def overlaps(layer: Any) -> bool:
    """Whether this is a layer of TE's that asks for overlap and gets it from us."""
    flags = (getattr(type(layer), name, None) for name in _FLAGS)
    return any(isinstance(flag, _Flag) and flag.asked(layer) for flag in flags)


def name_for(name: str, group: ProcessGroup) -> str:
    """What a layer of this name and group asks for in place of userbuffers. Nobody needs to have
    initialised those.
    """
    if not isinstance(base._ub_communicators, Communicators):
        put(base, "_ub_communicators", Communicators())
        _stand_in()
    base._ub_communicators.clear()  # of groups that have ended
    return f"{ops.name_of(group)}/{name}"


def _stand_in() -> None:
    coverage.overlapped_otherwise = overlaps
    put_everywhere("general_gemm", general_gemm)
    put_everywhere("assert_dim_for_fp8_exec", assert_dim_for_fp8_exec)
    put_everywhere("fill_userbuffers_buffer_for_all_gather", te_communicators.fill)
    put_everywhere("gather_along_first_dim", te_communicators.gather)
    preprocess = staticmethod(te_communicators.grad_output_preprocess)
    put_everywhere("grad_output_preprocess", preprocess)
    for name in _FLAGS:
        put_everywhere(name, _Flag(name))
