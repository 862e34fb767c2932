"""FlashOverlap: a GEMM counts its tiles, and plain collectives of finished bands of rows run beside
it.

It needs neither peer access nor one node: whatever the group's collectives run over will do. A
communication stream waits for the count of each band, which holds no SM, then starts the
collective. docs/how_it_works.md says more. AG+GEMM is the dual, in `gathered_bands.py`;
rows for wgrad alone `sequential` gathers.

    GEMM+RS, GEMM+AR
    caller's stream   one kernel: tiles of band 1 count [D] | of band 2 | ...     | join
    other stream      wait [D] of band 1 | collective of band 1 | wait [D] of band 2 | ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron.kernels import launch
from flux_megatron.kernels.hopper import config as hopper_config
from flux_megatron.kernels.hopper import gemm as hopper_gemm
from flux_megatron.kernels.portable.signalled_gemm import Band, bands, signalled_gemm
from flux_megatron.kernels.sizes import cdiv
from flux_megatron.overlap import collectives, fused, gathered_bands, sequential
from flux_megatron.overlap.phase import phase
from flux_megatron.overlap.stage import communicator, join, stage_of
from flux_megatron.patterns import COLUMN, ROW, Pattern
from flux_megatron.problem import Plan, Problem, Tile
from flux_megatron.scaling import Scaling
from flux_megatron.symm.space import Workspace

PATTERNS = (COLUMN, ROW, Pattern.GEMM_AR)
NEEDS_SYMMETRIC_MEMORY = False

_SUM = dist.ReduceScatterOptions()

GROUPS = 4
# 4 groups, M = 8192, 2 x H200, with 8 and 16 SMs: GEMM+RS, K 49152, 5926 and 6324 us, K 12288 1825
# and 1907; GEMM+AR 6079 and 6427, 1981 and 2015 (h200x2/signalled.jsonl).
COMM_SMS = 8

supports = launch.supports
start_gather = sequential.start_gather


def default_plan(problem: Problem) -> Plan:
    """Bands of the same size, as far as tiles allow. A library's GEMM leaves no SM to anybody."""
    return _plan(problem, GROUPS, 0 if problem.spec.gathers else COMM_SMS)


def why_not(problem: Problem, plan: Plan) -> str | None:
    """Why no call of the problem has this plan, or None. A library's GEMM has its own tiles."""
    return None if problem.spec.gathers else fused.why_not(problem, plan)


def candidates(problem: Problem) -> list[Plan]:
    """Plans worth measuring where no model predicts better ones: fewer and more groups."""
    return [_plan(problem, groups, COMM_SMS) for groups in (GROUPS, 2, 8)]


def _plan(problem: Problem, groups: int, comm_sms: int) -> Plan:
    tile = fused.default_plan(problem).tile
    if tile == hopper_config.TILE:
        tile = replace(tile, group_m=16)  # as `hopper` has it
    rows = problem.M_shard if problem.spec.scatters or problem.spec.gathers else problem.M
    band = cdiv(cdiv(rows, tile.block_m), groups) * tile.block_m
    group_rows = (band,) * (cdiv(rows, band) - 1)
    return Plan("signalled", tile=tile, group_rows=group_rows, comm_sms=comm_sms)


@dataclass(frozen=True)
class BandsInFlight:
    """Bands on their way: `finish` gives y, [M_shard, N] where they are scattered, else [M, N].

    The collectives read `staging` until then.
    """

    workspace: Workspace
    y: Tensor
    staging: Tensor

    def finish(self) -> Tensor:
        join(self.workspace)
        self.workspace.engine.hold(self.y, self.staging)
        return self.y


def ag_gemm(
    x: Tensor, w: Tensor, bias: Tensor | None, layout: str, plan: Plan, workspace: Workspace,
    consume: Callable[[Tensor], None] | None, scaling: Scaling | None = None,
) -> Tensor:  # fmt: skip
    """all_gather(x) @ w + bias, band after band; `consume` is called with the gathered rows."""
    stage, group = stage_of(workspace), communicator(workspace, plan.comm_sms)
    right = w.t() if layout == "nt" else w
    stage.begin(workspace)
    bands = plan.group_rows
    keep = consume is not None
    y, gathered = gathered_bands.ag_gemm(x, right, bands, group, stage.stream, keep, workspace)
    stage.open = False
    if bias is not None:
        y += bias
    if consume is not None and gathered is not None:
        consume(gathered)
    return y


def start_gemm_rs(
    x: Tensor, w: Tensor, layout: str, plan: Plan, workspace: Workspace
) -> BandsInFlight:
    """x @ w, each band scattered when its tiles are counted; `finish` gives y [M_shard, N]."""
    shards, N = workspace.world_size, w.shape[0] if layout == "nt" else w.shape[1]
    staging = x.new_empty(x.shape[0], N)
    y = x.new_empty(x.shape[0] // shards, N)

    def scatter(band: Band, group: ProcessGroup) -> dist.Work:
        last = band.first + band.rows
        block = staging[shards * band.first : shards * last]
        return group._reduce_scatter_base(y[band.first : last], block, _SUM)

    _start(x, w, staging, shards, layout, plan, workspace, "reduce-scatter", scatter)
    return BandsInFlight(workspace, y, staging)


def start_gemm_ar(
    x: Tensor, w: Tensor, layout: str, plan: Plan, workspace: Workspace
) -> BandsInFlight:
    """x @ w, each band reduced in place when its tiles are counted; `finish` gives y [M, N]."""
    y = x.new_empty(x.shape[0], w.shape[0] if layout == "nt" else w.shape[1])

    def reduce(band: Band, group: ProcessGroup) -> dist.Work:
        return group.allreduce([y[band.first : band.first + band.rows]])

    _start(x, w, y, 1, layout, plan, workspace, "all-reduce", reduce)
    return BandsInFlight(workspace, y, y)


def gemm_rs(x: Tensor, w: Tensor, layout: str, plan: Plan, workspace: Workspace) -> Tensor:
    return start_gemm_rs(x, w, layout, plan, workspace).finish()


def gemm_ar(x: Tensor, w: Tensor, layout: str, plan: Plan, workspace: Workspace) -> Tensor:
    return start_gemm_ar(x, w, layout, plan, workspace).finish()


def _start(
    x: Tensor, w: Tensor, out: Tensor, shards: int, layout: str, plan: Plan, workspace: Workspace,
    name: str, collective: Callable[[Band, ProcessGroup], dist.Work],
) -> None:  # fmt: skip
    """Enqueue the GEMM, then each band's wait and the collective of this name.

    In this order: where CUDA_DEVICE_MAX_CONNECTIONS is 1 the GEMM would stand behind the waits.
    """
    stage, group = stage_of(workspace), communicator(workspace, plan.comm_sms)
    made = bands(x.shape[0] // shards, out.shape[1], shards, plan.group_rows, plan.tile)
    table = stage.table(made)
    stage.begin(workspace)
    stage.stream.fork()  # before the kernel: collectives wait for tiles, not for its end
    with phase("signalled_gemm kernel"):  # `report().kernels` says which
        kernel_of(x, w, out.shape[1], made, shards, plan.tile)(
            x, w, out, table=table, tiles=sum(band.tiles for band in made), shards=shards,
            counters=stage.counters, work_counter=stage.work_counter, spare_sms=plan.comm_sms,
            layout=layout, tile=plan.tile,
        )  # fmt: skip
    with stage.stream.stream():
        for number, band in enumerate(made):
            stage.stream.wait_count(stage.count_of(number), band.tiles)  # wait [D]
            with phase(name):
                collectives.wait(collective(band, group), workspace)
    stage.clear(len(made))


def kernel_of(
    x: Tensor, w: Tensor, N: int, made: tuple[Band, ...], shards: int, tile: Tile
) -> Callable[..., None]:
    """The Hopper kernel, unless `hopper.gemm.refuses_bands` says why not, else the portable one.

    A kernel makes the bands' tiles in the order of `table` (`table_of`), adds 1 to the counter of a
    tile's band when the tile is stored (signal [D]), leaves the work counter 0, puts no CTA on
    `spare_sms` SMs, and waits for nobody.
    """
    of_bands = (x.device.type, x.dtype, x.shape[1], N, shards, made, tile)
    if hopper_gemm.refuses_bands(*of_bands) or not launch.has_whole_units(x, w):
        return signalled_gemm
    from flux_megatron.kernels.hopper import signalled_gemm as hopper_signalled_gemm

    return hopper_signalled_gemm.signalled_gemm
