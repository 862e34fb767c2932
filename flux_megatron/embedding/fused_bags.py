"""Slices that are sent as soon as they are pooled, and gradients that travel while entries are
sorted, over symmetric memory.

Forward is one kernel. Backward: the copy engine brings the gradients of each slice of samples to
the owners of the tables; meanwhile this rank sorts its entries by row; then each row is a sum in a
fixed order.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from flux_megatron.embedding.bags import Bags, bags_of_entries, outside
from flux_megatron.kernels.embedding import a2a as pooling
from flux_megatron.kernels.embedding.gradient import CHUNK, embedding_gradient
from flux_megatron.kernels.sizes import cdiv
from flux_megatron.overlap import transfer
from flux_megatron.overlap.phase import phase
from flux_megatron.symm.channel import Call, Region
from flux_megatron.symm.signals import comm_rows_at_least, slot
from flux_megatron.symm.workspace import Workspace

CHANNEL = "embedding"
SLICES = 8  # of each destination's samples


def forward(
    weight: Tensor, indices: Tensor, offsets: Tensor, bags: Bags, space: Workspace,
    slice_samples: int = 0,
) -> Tensor:  # fmt: skip
    """weight [T_local, rows, D]  ->  [B / R, T, D]."""
    call = transfer.begin(space, CHANNEL, _size_bytes(bags))
    tile = pooling.tile_of(bags.D, bags.samples, weight.device.type)
    with phase("embedding_a2a kernel"):
        y = pooling.embedding_a2a(
            weight, indices, offsets, call,
            first_tables=_first_tables(bags.first_tables, weight.device), tables=bags.tables,
            slice_samples=_slice_samples(bags, slice_samples, tile.block_m),
            mean=bags.mode == "mean", tile=tile,
        )  # fmt: skip
    space.end(call)
    return y


def backward(
    dy: Tensor, indices: Tensor, offsets: Tensor, bags: Bags, space: Workspace,
    slice_samples: int = 0, chunk: int = CHUNK,
) -> Tensor:  # fmt: skip
    """dy [B / R, T, D]  ->  dw [T_local, rows, D]."""
    call = transfer.begin(space, CHANNEL, _size_bytes(bags))
    gradients = bags.batch * bags.local, bags.D
    tile = pooling.tile_of(bags.D, bags.local * bags.rows, dy.device.type)
    slice_samples = _slice_samples(bags, slice_samples, 1)
    packed = _push(dy, bags, call, space, slice_samples)
    with phase("sort"):
        entries = sorted_entries(indices, offsets, bags)
    dw = dy.new_empty(bags.local, bags.rows, bags.D)
    with phase("gradient of rows"):
        embedding_gradient(
            call.region.view(bags.rank, gradients, bags.dtype), *entries, call,
            dw=dw, samples=bags.samples, slice_samples=slice_samples, tile=tile, chunk=chunk,
        )  # fmt: skip
    space.engine.join()
    del packed  # the pushes read it until here
    space.end(call)
    return dw


def sorted_entries(
    indices: Tensor, offsets: Tensor, bags: Bags
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Of the entries of all bags, by the row of the tables that they name, those of a row in the
    order of the bags: `keys` [nnz], the row; `entries` [nnz], the row of gradients [B, T_local];
    `starts` [T_local * rows + 1], the first entry of each row; `scales` [nnz], for means. Those
    that name no row of their table come behind the last row's.
    """
    (lengths, bag), device = bags_of_entries(indices, offsets), indices.device
    table_rows = bags.local * bags.rows
    narrow = torch.int32 if table_rows < 2**31 else torch.int64  # half the work of sorting
    keys = bag // bags.batch * bags.rows + indices
    keys = keys.masked_fill_(outside(indices, bags.rows), table_rows)
    keys, order = keys.to(narrow).sort(stable=True)
    bag = bag[order]
    entries = bag % bags.batch * bags.local + bag // bags.batch
    starts = torch.searchsorted(keys, torch.arange(table_rows + 1, device=device, dtype=narrow))
    scales = 1.0 / lengths[bag].float() if bags.mode == "mean" else None
    return keys, entries, starts, scales


def _push(dy: Tensor, bags: Bags, call: Call, space: Workspace, slice_samples: int) -> list[Tensor]:
    """Send the gradients of other ranks' tables to them, slice by slice; keep those of the own
    ones. The tensors must live until the engine is joined.
    """
    schedule = call.region.prepared(_push_schedule, bags, slice_samples)
    packed = []
    for owner, first, to, signal in schedule:
        theirs = dy[first : first + slice_samples, bags.columns(owner)]
        payload = dy.new_empty(theirs.shape).copy_(theirs)
        with phase("gradient push"):
            space.engine.fork()
            space.engine.copy(to, payload.data_ptr(), payload.nbytes)
            space.engine.signal(signal, call.epoch)
        packed.append(payload)
    mine = (bags.world_size, bags.samples, bags.local, bags.D)
    received = call.region.view(bags.rank, mine, bags.dtype)
    received[bags.rank].copy_(dy[:, bags.columns(bags.rank)])
    return packed


def _push_schedule(
    region: Region, bags: Bags, slice_samples: int
) -> list[tuple[int, int, int, int]]:
    """For each slice to each owner of tables: the owner, the first sample, and the addresses of its
    gradients and their signal.
    """
    schedule = []
    for step in range(1, region.world_size):
        owner = (region.rank + step) % region.world_size
        sample_bytes = bags.tables[owner] * bags.D * bags.dtype.itemsize
        theirs = region.view(owner, (bags.batch * sample_bytes,), torch.uint8).data_ptr()
        theirs += region.rank * bags.samples * sample_bytes
        for number, first in enumerate(range(0, bags.samples, slice_samples)):
            signal = region.pads[owner][slot(region.rank, number) :].data_ptr()  # signal [G]
            schedule.append((owner, first, theirs + first * sample_bytes, signal))
    return schedule


def _size_bytes(bags: Bags) -> int:
    """Of a region, the same on all ranks: the result of forward, or the gradients of backward."""
    rows = max(bags.samples * bags.first_tables[-1], bags.batch * max(bags.tables))
    return rows * bags.D * bags.dtype.itemsize


def _slice_samples(bags: Bags, wanted: int, block: int) -> int:
    """Samples of a slice: `wanted`, else whole blocks, at most SLICES slices."""
    wanted = wanted or cdiv(cdiv(bags.samples, SLICES), block) * block
    return comm_rows_at_least(bags.samples, wanted)


@lru_cache(maxsize=256)
def _first_tables(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)
