"""FlashOverlap: a GEMM counts its tiles, and plain collectives of finished bands of rows run beside
it.

It needs neither peer access nor one node: whatever the group's collectives run over will do. A
communication stream waits for the count of each band, which holds no SM, then starts the
collective; communicators take turns. docs/how_it_works.md says more. AG+GEMM is the dual, in
`gathered_bands.py`; rows for wgrad alone `sequential` gathers.

    GEMM+RS, GEMM+AR
    caller's stream   one kernel: tiles of band 1 count [D] | of band 2 | ...     | join
    other stream      wait [D] of band 1 | collective of band 1 | wait [D] of band 2 | ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron.kernels import launch
from flux_megatron.kernels.hopper import config as hopper_config
from flux_megatron.kernels.hopper import gemm as hopper_gemm
from flux_megatron.kernels.portable.signalled_gemm import Band, bands, signalled_gemm
from flux_megatron.overlap import collectives, fused, gathered_bands
from flux_megatron.overlap.band_shares import SMS_OF_ONE, group_rows_of, rows_of, shares_of
from flux_megatron.overlap.phase import phase
from flux_megatron.overlap.stage import communicators, stage_of
from flux_megatron.patterns import COLUMN, ROW, Pattern
from flux_megatron.problem import Plan, Problem, Tile
from flux_megatron.symm.device import capturing
from flux_megatron.symm.program import Builder, CallProgram
from flux_megatron.symm.steps import Slot

if TYPE_CHECKING:
    from flux_megatron.overlap.calls import InFlight

NEEDS_SYMMETRIC_MEMORY = False

_SUM = dist.ReduceScatterOptions()

supports = launch.supports
why_not = fused.why_not


def default_plan(problem: Problem) -> Plan:
    """The first of `candidates`."""
    return candidates(problem)[0]


def candidates(problem: Problem) -> list[Plan]:
    """Plans worth measuring where no model predicts better ones, the rule's first."""
    return [_plan(problem, *one) for one in shares_of(problem)]


def _plan(problem: Problem, shares: Sequence[int], turns: int) -> Plan:
    """Which rows each band has, and how many SMs collectives have."""
    tile = fused.default_plan(problem).tile
    if tile == hopper_config.TILE:
        tile = replace(tile, group_m=16)  # as `hopper` has it
    group_rows = group_rows_of(rows_of(problem), tile.block_m, shares)
    comm_sms = turns * SMS_OF_ONE
    return Plan("signalled", tile=tile, group_rows=group_rows, comm_sms=comm_sms)


def for_rows(plan: Plan, problem: Problem, M: int) -> Plan:
    """The plan of M rows as one of the problem's, with bands of the same shares."""
    rows = rows_of(replace(problem, M=M))
    shares = (*plan.group_rows, rows - sum(plan.group_rows))
    group_rows = group_rows_of(rows_of(problem), plan.tile.block_m, shares)
    return replace(plan, group_rows=group_rows)


def _gemm_rs(p: CallProgram) -> Slot:
    """Each band scattered when its tiles are counted."""
    out, y = p.x.new_empty(len(p.x), p.N), p.x.new_empty(len(p.x) // p.world_size, p.N)
    return _by_bands(p, p.world_size, "reduce-scatter", _scatter, y, out)


def _scatter(group: ProcessGroup, band: Band, shards: int, y: Tensor, out: Tensor) -> dist.Work:
    last = band.first + band.rows
    block = out[shards * band.first : shards * last]
    return group._reduce_scatter_base(y[band.first : last], block, _SUM)


def _gemm_ar(p: CallProgram) -> Slot:
    """Each band reduced in place when its tiles are counted."""
    return _by_bands(p, 1, "all-reduce", _reduce, p.x.new_empty(len(p.x), p.N))


def _reduce(group: ProcessGroup, band: Band, shards: int, y: Tensor) -> dist.Work:
    return group.allreduce([y[band.first : band.first + band.rows]])


def _by_bands(
    p: CallProgram, shards: int, name: str, collective: Callable[..., dist.Work], *made: Slot
) -> Slot:
    """The GEMM into the last of what is `made`, then each band's wait and the collective of this
    name; the result is the first.

    In this order: where CUDA_DEVICE_MAX_CONNECTIONS is 1 the GEMM would stand behind the waits.
    """
    plan, stage = p.plan, stage_of(p.space)
    of_bands = bands(len(p.x) // shards, p.N, shards, plan.group_rows, plan.tile)
    table = p.kept(stage.table(of_bands))
    p.follows = True
    p.host(_begin, table)
    with p.phase("signalled_gemm kernel"):  # `report().kernels` says which
        kernel_of(p.x, p.N, of_bands, shards, plan.tile)(
            p.x, p.w, made[-1], table=table, tiles=sum(band.tiles for band in of_bands),
            shards=shards, counters=p.kept(stage.counters), layout=p.layout, tile=plan.tile,
            work_counter=p.kept(stage.work_counter), spare_sms=plan.comm_sms,
        )  # fmt: skip
    p.host(partial(_collect, of_bands, shards, name, collective), *made)
    p.caller_step()
    p.host(_finish)
    p.held += made
    return made[0]


def _begin(call: InFlight, table: Tensor) -> None:
    stage = stage_of(call.space)
    communicators(call.space, call.program.plan.comm_sms)  # made before anything is enqueued
    stage.begin(call)
    if capturing(call.space.device):
        stage.hold(table)
    stage.stream.fork()  # before the kernel: collectives wait for tiles, not for its end


def _collect(
    of_bands: tuple[Band, ...], shards: int, name: str, collective: Callable[..., dist.Work],
    call: InFlight, *made: Tensor,
) -> None:  # fmt: skip
    """In one step: the host has a wait, a collective and a write to enqueue for each band."""
    stage = stage_of(call.space)
    groups = communicators(call.space, call.program.plan.comm_sms)
    with stage.stream.stream():
        for number, band in enumerate(of_bands):
            with phase(name):
                stage.stream.wait_count(stage.count_of(number), band.tiles)  # wait [D]
                group = groups[number % len(groups)]
                call.works.append(collective(group, band, shards, *made))
            stage.stream.write(stage.count_of(number), 0)  # for the next call
            _await_all_but(len(groups) - 1, call)


def _finish(call: InFlight) -> None:
    stage = stage_of(call.space)
    with stage.stream.stream():
        _await_all_but(0, call)
    stage.stream.join()
    stage.open = None


def _await_all_but(left: int, call: InFlight) -> None:
    """The current stream does."""
    while len(call.works) > left:
        collectives.wait(call.works.pop(0), call.space)


def kernel_of(
    x: Slot, N: int, made: tuple[Band, ...], shards: int, tile: Tile
) -> Callable[..., None]:
    """The Hopper kernel, unless `hopper.gemm.refuses_bands` says why not, else the portable one.

    A kernel makes the bands' tiles in the order of `table` (`table_of`), adds 1 to the counter of a
    tile's band when the tile is stored (signal [D]), leaves the work counter 0, puts no CTA on
    `spare_sms` SMs, and waits for nobody.
    """
    of_bands = (x.device.type, x.dtype, x.shape[1], N, shards, made, tile)
    if hopper_gemm.refuses_bands(*of_bands):
        return signalled_gemm
    from flux_megatron.kernels.hopper import signalled_gemm as hopper_signalled_gemm

    return hopper_signalled_gemm.signalled_gemm


BUILDERS: dict[Pattern, Builder] = {
    COLUMN: gathered_bands.ag_gemm, ROW: _gemm_rs, Pattern.GEMM_AR: _gemm_ar
}  # fmt: skip
