"""What `get_ub` gives to TransformerEngine's modules in place of userbuffers, and how it is filled.

TE gives operands with blockwise scales to no userbuffers, so that we fill our communicators with
them. Blocks along rows are not blocks along columns: TE quantizes what it gathers both ways. Our
operations move what is quantized along columns (of K). The GEMM of the weight's gradient reads the
other, which a gather of its own brings meanwhile.

That GEMM's x, which a column layer gathers again in backward, comes by copy engines too, whatever
its scales are: NCCL would take SMs from the GEMM of dx.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import transformer_engine_torch as tex
from torch import Tensor
from torch.distributed import ProcessGroup
from transformer_engine.pytorch.distributed import gather_along_first_dim
from transformer_engine.pytorch.module import base
from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

from flux_megatron import ops, pieces
from flux_megatron.scaling import BLOCK

_ROW = ("proj", "fc2")  # which gather dy in backward; others gather x in forward
_IN_FP8 = base.UserBufferQuantizationMode.FP8
_fill = base.fill_userbuffers_buffer_for_all_gather
_preprocess = base.TransformerEngineBaseModule.grad_output_preprocess


def gathers(name: str) -> bool:
    """Whether TE asks for this name to gather rows before a GEMM; else it scatters behind one."""
    layer, _, direction = name.rpartition("_")
    return (direction == "dgrad") == (layer in _ROW)


class Communicator:
    """What `get_ub` gives in place of userbuffers. TE puts in a shard and takes out the whole,
    which is there behind the GEMM.
    """

    def __init__(self, group: ProcessGroup, gathers_fp8: bool) -> None:
        self.group, self._gathers_fp8 = group, gathers_fp8
        self.shard: Tensor | None = None
        self._columnwise: tuple[Any, ...] = ()

    def is_fp8_ubuf(self) -> bool:
        return self._gathers_fp8

    def is_atomic_gemm(self) -> bool:
        return False

    def with_cublasmp(self) -> bool:
        return False

    def copy_into_buffer(self, shard: Tensor, local_chunk: bool = True) -> None:
        assert local_chunk, "the whole given, a shard expected"
        self.shard = shard

    def get_buffer(self, local_chunk: bool = False, shape: Any = None) -> Tensor:
        """Of the whole's shape. FP8 rows have no memory here: what reads them later reads their
        transpose.
        """
        assert self.shard is not None and not local_chunk, "there is the whole of a shard only"
        if self._gathers_fp8:
            return self.shard.new_empty(1).expand(shape)
        return self.shard.new_empty(shape)

    def taken(self) -> Tensor:
        assert self.shard is not None, "no shard given to gather"
        shard, self.shard = self.shard, None
        return shard

    def gather_columnwise(self, shard: Any, quantizer: Any) -> None:
        """Begin to gather what is quantized along rows. The shard is kept until it is there."""
        along_rows = quantizer.copy()
        along_rows.set_usage(rowwise=False, columnwise=True)
        whole, handle = _begin(shard, self.group, along_rows) or gather_along_first_dim(
            shard, self.group, async_op=True, quantizer=along_rows
        )
        self._columnwise = whole, handle, shard

    def give_columnwise(self, to: Any) -> None:
        """Add it to what stands for the whole, if there is any."""
        if self._columnwise:
            (whole, handle, _), self._columnwise = self._columnwise, ()
            if handle is not None:
                handle.wait()
            to._columnwise_data = whole._columnwise_data
            to._columnwise_scale_inv = whole._columnwise_scale_inv


class _InFlight:
    """A gather by copy engines, as TE waits for one: then `whole` is what it stands for."""

    def __init__(self, call: Any, whole: Any, K: int) -> None:
        self._call, self._whole, self._K = call, whole, K

    def wait(self) -> None:
        rows = self._call.complete()
        if isinstance(self._whole, base.Float8TensorStorage):
            keep(self._whole, rows)
        else:
            # a shard has a multiple of 128 rows: 8 bytes at once are copied faster than one
            shards = rows.view(torch.int64).view(-1, self._K, rows.shape[1] // 8)
            columns = shards.transpose(0, 1).flatten(1).view(rows.dtype)
            self._whole._columnwise_data = columns
            self._whole._columnwise_scale_inv = self._call.complete().clone()
        self._call.finish()


def keep(whole: Any, rows: Tensor) -> None:
    """What the GEMM of the weight's gradient reads of gathered rows, which were lent."""
    if isinstance(whole, Tensor):
        whole.view(rows.shape).copy_(rows)
    else:
        whole._transpose = tex.fp8_transpose(rows.view(torch.uint8), whole._fp8_dtype, out=None)
        whole._transpose_invalid = False


def _begin(shard: Any, group: ProcessGroup, quantizer: Any) -> tuple[Any, _InFlight] | None:
    """What stands for the whole of an FP8 shard, and its gather by copy engines; None for others,
    and where those have no memory of other ranks.
    """
    if isinstance(quantizer, base.Float8BlockQuantizer):
        if not isinstance(shard, base.Float8BlockwiseQTensorStorage):
            return None
        rows, scales = shard._columnwise_data, shard._columnwise_scale_inv
        if rows is None or quantizer.rowwise_usage or not quantizer.is_quantizable(shard):
            return None
        whole = base.Float8BlockwiseQTensorStorage(
            rowwise_data=None, rowwise_scale_inv=None, columnwise_data=None,
            columnwise_scale_inv=None, fp8_dtype=shard._fp8_dtype, quantizer=quantizer,
            is_2D_scaled=False,
        )  # fmt: skip
        rows = rows.flatten(1)
    else:
        # with GPUs whose GEMMs read the rows themselves the whole would be a copy
        if not isinstance(shard, base.Float8TensorStorage) or is_non_tn_fp8_gemm_supported():
            return None
        rows, scales = shard._data, None
        if rows is None:
            return None
        whole = base.Float8TensorStorage(
            data=rows.new_empty(1).expand(group.size() * len(rows), *rows.shape[1:]),
            fp8_scale_inv=shard._scale_inv, fp8_dtype=shard._fp8_dtype, quantizer=quantizer,
        )  # fmt: skip
        rows = rows.flatten(0, -2)
    if ops.gather_refused(group, rows.device) is not None:
        return None
    call = pieces.start_gather_beside(rows, scales, group)
    return whole, _InFlight(call, whole, len(rows))


def gather(
    shard: Any, group: ProcessGroup, async_op: bool = False, quantizer: Any = None
) -> tuple[Any, Any]:
    """TE's `gather_along_first_dim`, by copy engines for a column layer in whose backward a
    communicator of ours stands.
    """
    asked, found = _asked_last(), None
    if async_op and asked.endswith("_dgrad") and not gathers(asked):
        found = _begin(shard, group, quantizer)
    return found or gather_along_first_dim(shard, group, async_op=async_op, quantizer=quantizer)


def _asked_last() -> str:
    """The name of the communicator that TE asked for since the last gather, if it was ours."""
    ours = base._ub_communicators
    if not isinstance(ours, Communicators):
        return ""
    name, ours.asked_last = ours.asked_last, ""
    return name


class Communicators(dict[tuple[str, Any], Communicator]):
    """Of the groups that names of `te_overlap.name_for` have in front."""

    asked_last = ""

    def __getitem__(self, key: tuple[str, Any]) -> Communicator:
        self.asked_last = key[0].rpartition("/")[2]
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: tuple[str, Any]) -> Communicator:
        (group, _, name), mode = key[0].rpartition("/"), key[1]
        self[key] = Communicator(ops.group_named(group), mode is _IN_FP8 and gathers(name))
        return self[key]


def fill(comm: Any, local: Any, quantizer: Any, group: ProcessGroup) -> tuple[Any, Any]:
    """TE's `fill_userbuffers_buffer_for_all_gather`, of blockwise FP8 too. What stands for the
    whole has the scales of the shard.
    """
    if not isinstance(comm, Communicator) or not isinstance(quantizer, base.Float8BlockQuantizer):
        return _fill(comm, local, quantizer, group)
    size = local.size()
    if not quantizer.is_quantizable(local):
        rows = math.prod(size[:-1])
        raise ValueError(
            f"{rows} rows of {size[-1]} elements with blockwise scales on a rank given, multiples "
            f"of {BLOCK} expected: TransformerEngine gathers no others. Pad packed sequences, here "
            f"to {-(-rows // BLOCK) * BLOCK} rows on each tensor-parallel rank"
        )
    if not isinstance(local, base.Float8BlockwiseQTensorStorage):
        local = quantizer(local)
    comm.copy_into_buffer(local._rowwise_data)
    whole = base.Float8BlockwiseQTensorStorage(
        rowwise_data=comm.get_buffer(shape=[group.size() * size[0], *size[1:]]),
        rowwise_scale_inv=local._rowwise_scale_inv.detach(),  # which TE may clear
        columnwise_data=None, columnwise_scale_inv=None, fp8_dtype=local._fp8_dtype,
        quantizer=quantizer, is_2D_scaled=local._is_2D_scaled,
    )  # fmt: skip
    if quantizer.columnwise_usage and local._columnwise_data is not None:
        comm.gather_columnwise(local, quantizer)
    return whole, local


def grad_output_preprocess(ctx: Any, dy: Tensor, row: bool, quantizer: Any) -> Any:
    """TE's, which quantizes for its userbuffers along columns only. What it makes along rows, for
    the weight's gradient, cannot be made of that.
    """
    if row and ctx.ub_overlap_ag and isinstance(quantizer, base.Float8BlockQuantizer):
        quantizer.set_usage(columnwise=ctx.requires_wgrad)
    return _preprocess(ctx, dy, row, quantizer)
