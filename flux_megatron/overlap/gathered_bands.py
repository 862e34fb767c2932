"""AG+GEMM of `signalled`: the all-gather in bands of rows, beside a GEMM that goes on to each of
them when it has come.

The dual of the other patterns: there tiles let a collective begin, here a collective lets tiles
begin. Band g has the same rows of every shard, as one block [R, rows, K].

    caller's stream   kernel: local shard | band 1 [V] | band 2 [V] | ...    the same kernel: what
                                                                             the first one left
    communicators     gather 1 | gather 3 | ...
      in turns           gather 2 | gather 4 | ...
    stream of flags   [V] of band 1 | [V] of band 2 | ...

While the first kernel waits for a band, its CTAs leave one after the other (`step_us`), because an
all-gather may wait for SMs that they hold. The second comes behind all bands, and mostly finds
nothing left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron.kernels.hopper import gemm as hopper_gemm
from flux_megatron.kernels.portable import gathered_gemm as portable
from flux_megatron.kernels.portable.signalled_gemm import Band, bands
from flux_megatron.overlap import collectives
from flux_megatron.overlap.band_shares import SMS_OF_OTHERS
from flux_megatron.overlap.phase import phase
from flux_megatron.overlap.stage import communicators, stage_of
from flux_megatron.symm.device import capturing
from flux_megatron.symm.program import CallProgram
from flux_megatron.symm.steps import Slot

if TYPE_CHECKING:
    from flux_megatron.overlap.calls import InFlight

# Of three communicators in turns over host memory each has 8 GB/s.
SLOWEST_BYTES_PER_US, LATENCY_US = 5_000, 150


def ag_gemm(p: CallProgram) -> Slot:
    """all_gather(x [M_shard, K]) times w + bias; a caller step borrows the gathered rows."""
    plan, stage, (M_shard, K) = p.plan, stage_of(p.space), p.x.shape
    of_bands = bands(M_shard, p.N, p.world_size, plan.group_rows, plan.tile)
    y = p.x.new_empty(p.world_size * M_shard, p.N)
    blocks = p.x.new_empty(len(y), K)
    table = p.kept(stage.table(of_bands))
    p.follows = True
    p.host(partial(_begin, of_bands), p.x, blocks, table)

    def multiply(step: int) -> None:
        with p.phase("gathered_gemm kernel"):
            _kernel_of(p, of_bands)(
                p.x, blocks, p.w, p.bias, y, table=table, words=p.kept(stage.words), rank=p.rank,
                bands=len(of_bands), step_us=step, spare_sms=plan.comm_sms + SMS_OF_OTHERS,
                layout=p.layout, tile=plan.tile,
            )  # fmt: skip

    multiply(step_us(of_bands, p.world_size, K * p.x.element_size()))
    p.host(partial(_gather, of_bands), p.x, blocks)
    multiply(0)
    if p.caller_steps:
        ordered = p.x.new_empty(len(y), K)
        p.host(partial(_order, of_bands), blocks, ordered)
        p.caller_step(ordered)
    return y


def step_us(of_bands: Sequence[Band], world_size: int, row_bytes: int) -> int:
    """How long until the next CTA leaves, so that 32 have left when the largest band is as late as
    it may be. Who has left does not come back in this call.
    """
    rows = (world_size - 1) * max(band.rows for band in of_bands)
    return (LATENCY_US + rows * row_bytes // SLOWEST_BYTES_PER_US) // 32


def _kernel_of(p: CallProgram, of_bands: tuple[Band, ...]) -> Any:
    """The Hopper kernel, unless `hopper.gemm.refuses_gathered` says why not, else the portable
    one.
    """
    x = p.x
    given = x.device.type, x.dtype, x.shape[1], p.N, of_bands, p.plan.tile
    if hopper_gemm.refuses_gathered(*given):
        return portable.gathered_gemm
    from flux_megatron.kernels.hopper import gathered_gemm

    return gathered_gemm.gathered_gemm


def _begin(
    of_bands: tuple[Band, ...], call: InFlight, x: Tensor, blocks: Tensor, table: Tensor
) -> None:
    """The first band of each communicator, before the kernel: rows are sent beside it."""
    stage = stage_of(call.space)
    groups = communicators(call.space, call.program.plan.comm_sms)
    stage.begin(call)
    if capturing(call.space.device):
        stage.hold(table)
    stage.words.zero_()
    stage.stream.fork()
    for group, band in zip(groups, of_bands, strict=False):
        _start(group, band, call, x, blocks)


def _start(group: ProcessGroup, band: Band, call: InFlight, x: Tensor, blocks: Tensor) -> None:
    rows = slice(band.first, band.first + band.rows)
    with stage_of(call.space).stream.stream(), phase("all-gather"):
        work = group._allgather_base(_block(band, group.size(), blocks), x[rows])
    call.works.append(work)


def _block(band: Band, shards: int, blocks: Tensor) -> Tensor:
    return blocks[shards * band.first : shards * (band.first + band.rows)]


def _gather(of_bands: tuple[Band, ...], call: InFlight, x: Tensor, blocks: Tensor) -> None:
    """The other bands, and the flag of each. With CUDA_DEVICE_MAX_CONNECTIONS=1 a gather stands
    behind the one before of its communicator, and would have stood before the kernel.
    """
    stage = stage_of(call.space)
    groups = communicators(call.space, call.program.plan.comm_sms)
    turns: Iterator[ProcessGroup] = islice(cycle(groups), len(groups), None)
    others = iter(of_bands[len(groups) :])
    for number in range(1, len(of_bands) + 1):
        for band in islice(others, 1):
            _start(next(turns), band, call, x, blocks)
        with stage.flags.stream(), phase("wait"):
            collectives.wait(call.works.pop(0), call.space)
        stage.flags.write(stage.words.data_ptr() + 4 * (portable.FLAGS + number), 1)  # flag [V]
    stage.join()
    stage.open = None


def _order(of_bands: tuple[Band, ...], call: InFlight, blocks: Tensor, ordered: Tensor) -> None:
    """The gathered rows by rank."""
    shards = call.program.world_size
    parts = [_block(band, shards, blocks).view(shards, band.rows, -1) for band in of_bands]
    torch.cat(parts, 1, out=ordered.view(shards, -1, ordered.shape[1]))
