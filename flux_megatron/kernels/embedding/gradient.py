"""The gradient of embedding tables: every row of a table is the sum of its bags' gradients.

Pooling, transposed: the entries of all bags, sorted by the row that they name, are bags of gradient
rows. The order of a sum is that of the sort and of fixed chunks, so the same operands give the same
bits; sums are fp32, rounded once. Many rows of few entries and few rows of many both keep the GPU
busy: entries are also summed in chunks of CHUNK where a chunk has one row only.

chunk_sums_kernel    the sum of each chunk that lies within one row
row_sums_kernel      of each row: entries before its first whole chunk, chunks, entries behind

Both wait [G] for the gradients of every rank, which the copy engine brings. A library call, the
sort, runs before them meanwhile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flux_megatron.kernels import launch
from flux_megatron.kernels.embedding.a2a import CTAS_PER_SM, ROWS_AT_ONCE, add_rows
from flux_megatron.kernels.primitives import deadline_after, wait_rows
from flux_megatron.kernels.sizes import cdiv
from flux_megatron.kernels.triton_launch import launch_kernel
from flux_megatron.problem import Tile
from flux_megatron.symm.channel import Call

CHUNK = 256  # entries


@triton.jit
def wait_gradients(
    pad, status, rank, samples, slice_samples, epoch, timeout_ns, WORLD_SIZE: tl.constexpr
):
    deadline = deadline_after(timeout_ns)
    for step in range(1, WORLD_SIZE):
        source = (rank + step) % WORLD_SIZE
        wait_rows(pad, source, 0, samples - 1, slice_samples, epoch, deadline, status)  # wait [G]


# numbers that change from call to call must not compile a kernel each
@triton.jit(do_not_specialize=["rank", "epoch", "timeout_ns", "chunks"])
def chunk_sums_kernel(
    gradients, keys, entries, scales, sums, pad, status,
    rank, epoch, timeout_ns: tl.int64, chunks, bags, samples, slice_samples, D,
    WORLD_SIZE: tl.constexpr, SCALED: tl.constexpr, UNROLL: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    wait_gradients(pad, status, rank, samples, slice_samples, epoch, timeout_ns, WORLD_SIZE)
    for block in range(tl.program_id(0), tl.cdiv(chunks, BLOCK_M), tl.num_programs(0)):
        chunk = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        begins = chunk * CHUNK
        first = tl.load(keys + begins, mask=chunk < chunks, other=0)
        last = tl.load(keys + begins + CHUNK - 1, mask=chunk < chunks, other=1)
        ends = tl.where(first == last, begins + CHUNK, begins)
        for col in range(0, D, BLOCK_N):
            cols = col + tl.arange(0, BLOCK_N)
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            acc = add_rows(
                acc, gradients, entries, scales, begins, ends, bags, cols, D, SCALED, UNROLL
            )
            mask = (first == last)[:, None] & (cols < D)[None, :]
            tl.store(sums + chunk[:, None] * D + cols[None, :], acc, mask=mask)


@triton.jit
def add_chunks(acc, sums, begins, ends, cols, D):
    """acc plus, for each i, the sums of chunks begins[i] to ends[i] - 1."""
    for step in range(0, tl.max(ends - begins, 0).to(tl.int32)):
        chunk = begins + step
        mask = (chunk < ends)[:, None] & (cols < D)[None, :]
        acc += tl.load(sums + chunk[:, None] * D + cols[None, :], mask=mask, other=0.0)
    return acc


@triton.jit(do_not_specialize=["rank", "epoch", "timeout_ns"])
def row_sums_kernel(
    gradients, starts, entries, scales, sums, dw, pad, status,
    rank, epoch, timeout_ns: tl.int64, bags, samples, slice_samples, table_rows, D,
    WORLD_SIZE: tl.constexpr, SCALED: tl.constexpr, UNROLL: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    wait_gradients(pad, status, rank, samples, slice_samples, epoch, timeout_ns, WORLD_SIZE)
    table_rows = tl.cast(table_rows, tl.int64)  # the last tile may reach beyond 2^31
    for block in range(tl.program_id(0), tl.cdiv(table_rows, BLOCK_M), tl.num_programs(0)):
        row = block * BLOCK_M + tl.arange(0, BLOCK_M)
        begins = tl.load(starts + row, mask=row < table_rows, other=0)
        ends = tl.load(starts + row + 1, mask=row < table_rows, other=0)
        whole = tl.minimum((begins + CHUNK - 1) // CHUNK * CHUNK, ends)  # where chunks begin
        behind = tl.maximum(ends // CHUNK * CHUNK, whole)  # and end
        for col in range(0, D, BLOCK_N):
            cols = col + tl.arange(0, BLOCK_N)
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            acc = add_rows(
                acc, gradients, entries, scales, begins, whole, bags, cols, D, SCALED, UNROLL
            )
            acc = add_chunks(acc, sums, whole // CHUNK, behind // CHUNK, cols, D)
            acc = add_rows(
                acc, gradients, entries, scales, behind, ends, bags, cols, D, SCALED, UNROLL
            )
            mask = (row < table_rows)[:, None] & (cols < D)[None, :]
            at = row[:, None] * D + cols[None, :]
            tl.store(dw + at, acc.to(dw.dtype.element_ty), mask=mask)


def embedding_gradient(
    gradients: Tensor, keys: Tensor, entries: Tensor, starts: Tensor, scales: Tensor | None,
    call: Call, *, dw: Tensor, samples: int, slice_samples: int, tile: Tile, chunk: int = CHUNK,
) -> None:  # fmt: skip
    """dw [T_local, rows, D] from gradients [B * T_local, D], once they have come.

    Entry i of the sorted entries is of row `keys[i]` of the tables, adds row `entries[i]` of the
    gradients, times `scales[i]` if there are any. Those of table row j are `starts[j]` to
    `starts[j + 1] - 1`.
    """
    bags, D = gradients.shape
    chunks = keys.numel() // chunk
    sums = torch.empty(max(chunks, 1), D, dtype=torch.float32, device=dw.device)
    weights = entries if scales is None else scales
    interpreted, region = dw.device.type == "cpu", call.region

    def launched(kernel, blocks: int, tensors: tuple, numbers: tuple, sizes: tuple) -> None:
        (sms,) = launch.persistent_grid(dw.device, cdiv(blocks, CTAS_PER_SM))
        launch_kernel(
            kernel, (sms if interpreted else min(blocks, CTAS_PER_SM * sms),), tile,
            (*tensors, region.pads[region.rank], call.status),
            (*call.numbers, *numbers), sizes,
            WORLD_SIZE=region.world_size, SCALED=scales is not None, CHUNK=chunk,
            UNROLL=1 if interpreted else ROWS_AT_ONCE,
        )  # fmt: skip

    if chunks:
        sizes = (bags, samples, slice_samples, D)
        blocks = 1 << (cdiv(chunks, tile.block_m) - 1).bit_length()  # few grids for any nnz
        launched(
            chunk_sums_kernel, blocks, (gradients, keys, entries, weights, sums), (chunks,), sizes
        )
    table_rows = starts.numel() - 1
    launched(
        row_sums_kernel, cdiv(table_rows, tile.block_m),
        (gradients, starts, entries, weights, sums, dw), (),
        (bags, samples, slice_samples, table_rows, D),
    )  # fmt: skip
