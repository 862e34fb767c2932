"""AG+GEMM of `signalled`: the all-gather in bands of rows, beside GEMMs of those that have come.

The dual of the other patterns: there tiles let a collective begin, here a collective lets a GEMM
begin, by an event. Band g has the same rows of every shard, as one block [R, rows, K]. No kernel
waits, so it holds no SM while rows are on their way.

| time | communicators, in turns | caller's stream |
| --- | --- | --- |
| 1 | gather bands 0, 1 and 2 | the local shard, which needs no other rank |
| 2 | gather band 3 | remote rows of band 0 |
| 3 | gather band 4 | remote rows of band 1 |
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from flux_megatron.kernels.portable.signalled_gemm import ends_of
from flux_megatron.overlap import collectives
from flux_megatron.overlap.phase import phase
from flux_megatron.symm.copy_engine import CopyEngine
from flux_megatron.symm.space import Workspace


class Arriving(NamedTuple):
    """A band on its way: rows `first` to `last` of each shard, in `block` [R, rows, K]."""

    first: int
    last: int
    block: Tensor
    work: Work


class Multiply(Protocol):
    """x [n, rows, K] times w ([N, K] or [K, N]) into `out`, rows of n shards of y."""

    def __call__(self, x: Tensor, w: Tensor, *, out: Tensor) -> None: ...


def ag_gemm(
    group_rows: tuple[int, ...], groups: Sequence[ProcessGroup], stream: CopyEngine,
    workspace: Workspace, multiply: Multiply, x: Tensor, w: Tensor, y: Tensor, blocks: Tensor,
    ordered: Tensor | None = None,
) -> None:  # fmt: skip
    """all_gather(x [M_shard, K]) times w: y [M, N]. Of `groups` each gathers a band in its turn,
    from `stream` on. The rows go to `blocks` [M, K] as they come, and to `ordered` [M, K] by rank.
    """
    rank, shards, (rows, K) = groups[0].rank(), groups[0].size(), x.shape
    y = y.view(shards, rows, -1)
    if ordered is not None:
        ordered = ordered.view(shards, rows, K)

    def start(first: int, last: int, group: ProcessGroup) -> Arriving:
        block = blocks[shards * first : shards * last]
        with stream.stream(), phase("all-gather"):
            work = group._allgather_base(block, x[first:last])
        return Arriving(first, last, block.view(shards, last - first, K), work)

    ends = ends_of(rows, group_rows)
    gathers = map(start, [0, *ends], ends, cycle(groups))
    stream.fork()  # before the GEMM: rows are sent beside it
    arriving = [*islice(gathers, len(groups))]
    with phase("gemm chunk"):
        multiply(x.unsqueeze(0), w, out=y[rank : rank + 1])
    # Each of the others is enqueued one GEMM ahead. With CUDA_DEVICE_MAX_CONNECTIONS=1 all of them
    # at once would stand before the GEMMs.
    while arriving:
        arriving += islice(gathers, 1)
        band = arriving.pop(0)
        with phase("wait"):
            collectives.wait(band.work, workspace)
        with phase("gemm chunk"):
            for others in (slice(0, rank), slice(rank + 1, shards)):
                multiply(band.block[others], w, out=y[others, band.first : band.last])
        if ordered is not None:
            ordered[:, band.first : band.last] = band.block
    stream.join()


def multiply(layout: str, x: Tensor, w: Tensor, *, out: Tensor) -> None:
    """`Multiply` by the library: one GEMM, or one batched. It leaves no SM to anybody."""
    right = w.t() if layout == "nt" else w
    if len(x) == 1:
        torch.mm(x[0], right, out=out[0])
    elif len(x):
        torch.bmm(x, right.expand(len(x), *right.shape), out=out)
