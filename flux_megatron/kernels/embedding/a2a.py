"""Embedding + All-to-All: bags are pooled and each row goes straight to the rank of its sample
(Punniyamurthy et al., SC'24).

embedding_a2a_kernel  takes the bags of rank+1's samples first, of its own samples last; stores each
                      pooled row into its destination's buffer; the last tile of a slice raises
                      signal [P] there; at the end it waits [P] of every slice of other ranks and
                      copies it to the result. CTAs draw tiles from a work counter

A slice is a block of samples of one destination, over all tables of this rank. Rows of the own
samples go to the result at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flux_megatron.kernels import launch
from flux_megatron.kernels.portable.tile_draws import (
    begin_draw,
    close_draws,
    end_draw,
    first_tile,
    settle,
)
from flux_megatron.kernels.primitives import (
    MAX_COMM_TILES,
    count_acq_rel_gpu,
    deadline_after,
    signal_release_sys,
    wait_acquire_sys,
)
from flux_megatron.kernels.sizes import cdiv, next_power_of_2
from flux_megatron.kernels.triton_launch import launch_kernel
from flux_megatron.problem import Tile
from flux_megatron.symm.channel import Call
from flux_megatron.symm.signals import WORK_CLAIMS, WORK_WORDS

CTAS_PER_SM = 3  # loads of many bags in flight hide the latency of each
ROWS_AT_ONCE = 2  # of one bag, in flight together


@triton.jit
def add_rows(
    acc, values, indices, scales, begins, ends, rows, cols, D,
    SCALED: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_M, BLOCK_N] plus, for each i, rows `indices[begins[i]:ends[i]]` of values
    [rows, D], in this order, times `scales` if SCALED. Indices outside 0 to rows - 1 add nothing.
    """
    longest = tl.max(ends - begins, 0).to(tl.int32)
    for first in range(0, longest, UNROLL):
        for step in tl.static_range(UNROLL):
            at = begins + first + step
            inside = at < ends
            row = tl.load(indices + at, mask=inside, other=-1)
            inside = inside & (row >= 0) & (row < rows)
            mask = inside[:, None] & (cols < D)[None, :]
            found = tl.load(values + row[:, None] * D + cols[None, :], mask=mask, other=0.0)
            found = found.to(tl.float32)
            if SCALED:
                found *= tl.load(scales + at, mask=inside, other=0.0)[:, None]
            acc += found
    return acc


@triton.jit
def pool_tile(
    weight, indices, offsets, out, table, bag, sample, inside, out_column, nnz, rows, row_size, D,
    MEAN: tl.constexpr, UNROLL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Pool bags `bag` of one table; row `sample` of out [samples, row_size] gets each at
    `out_column`.
    """
    begins = tl.load(offsets + bag, mask=inside, other=0)
    ends = tl.load(offsets + bag + 1, mask=inside, other=0)
    begins, ends = tl.maximum(begins, 0), tl.minimum(ends, nnz)
    rows_of_table = weight + table.to(tl.int64) * rows * D
    for col in range(0, D, BLOCK_N):
        cols = col + tl.arange(0, BLOCK_N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        acc = add_rows(
            acc, rows_of_table, indices, indices, begins, ends, rows, cols, D,
            SCALED=False, UNROLL=UNROLL,
        )  # fmt: skip
        if MEAN:
            acc /= tl.maximum(ends - begins, 1).to(tl.float32)[:, None]
        at = sample.to(tl.int64)[:, None] * row_size + out_column + cols[None, :]
        mask = inside[:, None] & (cols < D)[None, :]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def copy_columns(
    source, target, sample, inside, row_size, first_column, last_column,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Columns of some rows, from source to target, both [samples, row_size]."""
    for col in range(first_column, last_column, BLOCK_N):
        cols = col + tl.arange(0, BLOCK_N)
        at = sample.to(tl.int64)[:, None] * row_size + cols[None, :]
        mask = inside[:, None] & (cols < last_column)[None, :]
        tl.store(target + at, tl.load(source + at, mask=mask, other=0.0), mask=mask)


# numbers that change from call to call must not compile a kernel each
@triton.jit(do_not_specialize=["rank", "epoch", "timeout_ns", "nnz"])
def embedding_a2a_kernel(
    weight, indices, offsets, y, received, received_pointers, first_tables,
    pad, pad_pointers, counters, work_counter, status,
    rank, epoch, timeout_ns: tl.int64, nnz: tl.int64, rows, samples, slice_samples, D,
    WORLD_SIZE: tl.constexpr, MEAN: tl.constexpr, UNROLL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_WARPS: tl.constexpr,
):  # fmt: skip
    deadline = deadline_after(timeout_ns)
    first_table = tl.load(first_tables + rank)
    tables = tl.load(first_tables + rank + 1) - first_table
    row_size = tl.load(first_tables + WORLD_SIZE) * D
    slices = tl.cdiv(samples, slice_samples)
    blocks_slice = tl.cdiv(slice_samples, BLOCK_M)
    tiles_slice = tables * blocks_slice
    tiles_rank = slices * tiles_slice
    pooled = WORLD_SIZE * tiles_rank
    tiles = pooled + (WORLD_SIZE - 1) * slices * blocks_slice
    tile = first_tile(work_counter)
    while tile < tiles:
        ticket = begin_draw(work_counter, NUM_WARPS)  # awaited when this tile is stored
        if tile < pooled:
            destination = (rank + 1 + tile // tiles_rank) % WORLD_SIZE
            slice = tile % tiles_rank // tiles_slice
            table = tile % tiles_slice // blocks_slice
            sample = slice * slice_samples + tile % blocks_slice * BLOCK_M + tl.arange(0, BLOCK_M)
            inside = sample < tl.minimum((slice + 1) * slice_samples, samples)
            batch = tl.cast(samples, tl.int64) * WORLD_SIZE
            bag = table * batch + destination * tl.cast(samples, tl.int64) + sample
            out = y
            if destination != rank:
                out = tl.load(received_pointers + destination).to(y.dtype)
                out = tl.multiple_of(out, 16)  # bytes, or rows would be stored word by word
            pool_tile(
                weight, indices, offsets, out, table, bag, sample, inside,
                (first_table + table) * D, nnz, rows, row_size, D,
                MEAN, UNROLL, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            if destination != rank:
                counter = counters + destination * MAX_COMM_TILES + slice
                if count_acq_rel_gpu(counter, tiles_slice):  # flag [Q]
                    theirs = tl.load(pad_pointers + destination).to(counters.dtype)
                    signal_release_sys(theirs, rank * MAX_COMM_TILES + slice, epoch)  # signal [P]
        else:
            left = tile - pooled
            # in the order in which they come: rank-1 serves this rank first
            source = (rank + WORLD_SIZE - 1 - left // (slices * blocks_slice)) % WORLD_SIZE
            slice = left % (slices * blocks_slice) // blocks_slice
            sample = slice * slice_samples + left % blocks_slice * BLOCK_M + tl.arange(0, BLOCK_M)
            inside = sample < tl.minimum((slice + 1) * slice_samples, samples)
            wait_acquire_sys(
                pad, source * MAX_COMM_TILES + slice, epoch, deadline, status
            )  # wait [P]
            first_column = tl.load(first_tables + source) * D
            last_column = tl.load(first_tables + source + 1) * D
            copy_columns(received, y, sample, inside, row_size, first_column, last_column, BLOCK_N)
        tile = settle(end_draw(ticket), work_counter)
    close_draws(tile, tiles, work_counter)


def tile_of(D: int, bags: int, device: str) -> Tile:
    """Bags and columns of a tile, where there are so many bags in a row.

    Interpreted code costs as much for a small tile as for a large one: few large ones.
    """
    if device == "cpu":
        return Tile(min(256, next_power_of_2(bags)), next_power_of_2(D), num_warps=4)
    # a warp has four bags of 128 columns in flight
    block_n = min(128, next_power_of_2(D))
    return Tile(max(4, min(4096 // block_n, next_power_of_2(bags))), block_n, num_warps=8)


def embedding_a2a(
    weight: Tensor, indices: Tensor, offsets: Tensor, call: Call, *, first_tables: Tensor,
    tables: tuple[int, ...], slice_samples: int, mean: bool, tile: Tile,
) -> Tensor:  # fmt: skip
    """weight [T_local, rows, D], indices [nnz], offsets [T_local * B + 1]  ->  [B / R, T, D].

    `tables` has every rank's T_local, `first_tables` [R + 1] on the device their sums. The other
    ranks' rows come to the call's region, which is as large as the result.
    """
    samples = (offsets.numel() - 1) // weight.shape[0] // len(tables)
    rows, D = weight.shape[1:]
    y = weight.new_empty(samples, sum(tables), D)
    region, channel = call.region, call.channel
    rank, received = region.rank, region.view(region.rank, y.shape, y.dtype)
    world_size, interpreted = len(tables), weight.device.type == "cpu"
    blocks = cdiv(samples, slice_samples) * cdiv(slice_samples, tile.block_m)
    tiles = world_size * blocks * tables[rank] + (world_size - 1) * blocks
    (grid,) = launch.persistent_grid(weight.device, tiles)
    if not interpreted:
        grid = min(tiles, CTAS_PER_SM * grid, WORK_WORDS - WORK_CLAIMS)
    launch_kernel(
        embedding_a2a_kernel, (grid,), tile,
        (
            weight, indices, offsets, y, received, region.pointers, first_tables,
            region.pads[rank], region.pad_pointers, channel.tile_counters, channel.work_counter,
            call.status,
        ),
        (*call.numbers, indices.numel()),
        (rows, samples, slice_samples, D),
        WORLD_SIZE=world_size, MEAN=mean, UNROLL=1 if interpreted else ROWS_AT_ONCE,
    )  # fmt: skip
    return y
