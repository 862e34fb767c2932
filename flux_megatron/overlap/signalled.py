"""FlashOverlap: a GEMM counts its tiles, and plain collectives of finished bands of rows run beside
it.

It needs neither peer access nor one node: whatever the group's collectives run over will do. A
communication stream waits for the count of each band, which holds no SM, then starts the
collective. docs/how_it_works.md says more. AG+GEMM is the dual, in `gathered_bands.py`;
rows for wgrad alone `sequential` gathers.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron import errors
from flux_megatron.kernels import hopper_config, hopper_gemm, launch
from flux_megatron.kernels.signalled_gemm import Band, bands, signalled_gemm, table_of
from flux_megatron.kernels.sizes import cdiv
from flux_megatron.overlap import collectives, fused, gathered_bands, sequential
from flux_megatron.overlap.phase import phase
from flux_megatron.patterns import COLUMN, ROW, Pattern
from flux_megatron.problem import MAX_GROUPS, Plan, Problem, Tile
from flux_megatron.scaling import Scaling
from flux_megatron.symm.device import capturing, communication_stream
from flux_megatron.symm.groups import timeout_s
from flux_megatron.symm.lasting import lasting
from flux_megatron.symm.recent import Recent
from flux_megatron.symm.signals import WORK_WORDS
from flux_megatron.symm.space import Workspace
from flux_megatron.symm.workspace import workspaces

PATTERNS = (COLUMN, ROW, Pattern.GEMM_AR)
NEEDS_SYMMETRIC_MEMORY = False

_SUM = dist.ReduceScatterOptions()

GROUPS = 4
# 4 groups, M = 8192, 2 x H200, with 8 and 16 SMs: GEMM+RS, K 49152, 5926 and 6324 us, K 12288 1825
# and 1907; GEMM+AR 6079 and 6427, 1981 and 2015 (h200x2/signalled.jsonl).
COMM_SMS = 8

start_gather = sequential.start_gather


def supports(problem: Problem) -> str | None:
    """Why this strategy cannot run the problem, or None."""
    return launch.supports(problem)


def default_plan(problem: Problem) -> Plan:
    """Bands of the same size, as far as tiles allow. A library's GEMM leaves no SM to anybody."""
    return _plan(problem, GROUPS, 0 if problem.spec.gathers else COMM_SMS)


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
    _open(stage, workspace)
    bands = plan.group_rows
    y = gathered_bands.ag_gemm(x, right, bands, group, stage.stream, consume, workspace)
    stage.open = False
    if bias is not None:
        y += bias
    return y


def start_gemm_rs(
    x: Tensor, w: Tensor, layout: str, plan: Plan, workspace: Workspace
) -> BandsInFlight:
    """x @ w, each band scattered when its tiles are counted; `finish` gives y [M_shard, N]."""
    shards, N = workspace.world_size, w.shape[0] if layout == "nt" else w.shape[1]
    staging = x.new_empty(x.shape[0], N)
    y = x.new_empty(x.shape[0] // shards, N)

    def scatter(band: Band, group: ProcessGroup) -> None:
        last = band.first + band.rows
        block = staging[shards * band.first : shards * last]
        with phase("reduce-scatter"):
            work = group._reduce_scatter_base(y[band.first : last], block, _SUM)
            collectives.wait(work, workspace)

    _start(x, w, staging, shards, layout, plan, workspace, scatter)
    return BandsInFlight(workspace, y, staging)


def start_gemm_ar(
    x: Tensor, w: Tensor, layout: str, plan: Plan, workspace: Workspace
) -> BandsInFlight:
    """x @ w, each band reduced in place when its tiles are counted; `finish` gives y [M, N]."""
    y = x.new_empty(x.shape[0], w.shape[0] if layout == "nt" else w.shape[1])

    def reduce(band: Band, group: ProcessGroup) -> None:
        with phase("all-reduce"):
            work = group.allreduce([y[band.first : band.first + band.rows]])
            collectives.wait(work, workspace)

    _start(x, w, y, 1, layout, plan, workspace, reduce)
    return BandsInFlight(workspace, y, y)


def gemm_rs(x: Tensor, w: Tensor, layout: str, plan: Plan, workspace: Workspace) -> Tensor:
    return start_gemm_rs(x, w, layout, plan, workspace).finish()


def gemm_ar(x: Tensor, w: Tensor, layout: str, plan: Plan, workspace: Workspace) -> Tensor:
    return start_gemm_ar(x, w, layout, plan, workspace).finish()


class Stage:
    """What the calls of a workspace share: counters that are 0 between calls, a stream, and one
    open call.
    """

    @lasting()
    def __init__(self, device: torch.device) -> None:
        self.stream = communication_stream(device)
        self.counters = torch.zeros(MAX_GROUPS, dtype=torch.int32, device=device)
        self.work_counter = torch.zeros(WORK_WORDS, dtype=torch.int32, device=device)
        self.open = False
        self.communicators: dict[int, Any] = {}  # by the SMs that they may hold
        self._device = device
        self._tables: Recent[tuple[Band, ...], Tensor] = Recent()
        self._captured: dict[tuple[Band, ...], Tensor] = {}  # graphs know their addresses

    @lasting()
    def table(self, made: tuple[Band, ...]) -> Tensor:
        """The kernel's table of the bands. A table that a graph has captured stays."""
        table = self._captured.get(made, self._tables.get(made))
        if table is None:
            _refuse_capture(self._device)
            table = self._tables[made] = table_of(made, self._device)
        elif capturing(self._device):
            self._captured[made] = table
        return table

    @property
    def held_by_graph(self) -> bool:
        return bool(self._captured)

    def join(self) -> None:
        """What the current stream gets from now on comes after all collectives so far."""
        self.stream.join()

    def close(self) -> None:
        """A peer that is gone is not waited for."""
        while self.communicators:
            _, own = self.communicators.popitem()
            own.abort()

    def refuse_second(self) -> None:
        """`WorkspaceError` while a call is open."""
        if self.open:
            raise errors.WorkspaceError("a GEMM of signalled was begun while another was open")

    def clear(self, bands: int) -> None:
        """Set the counts of so many bands to 0, behind what the stream holds."""
        for band in range(bands):
            self.stream.write(self.count_of(band), 0)

    def count_of(self, band: int) -> int:
        """The address of a band's counter."""
        return self.counters.data_ptr() + band * self.counters.element_size()


def _start(
    x: Tensor, w: Tensor, out: Tensor, shards: int, layout: str, plan: Plan, workspace: Workspace,
    collective: Callable[[Band, ProcessGroup], None],
) -> None:  # fmt: skip
    """Enqueue the GEMM, then each band's wait and collective.

    In this order: where CUDA_DEVICE_MAX_CONNECTIONS is 1 the GEMM would stand behind the waits.
    """
    stage, group = stage_of(workspace), communicator(workspace, plan.comm_sms)
    made = bands(x.shape[0] // shards, out.shape[1], shards, plan.group_rows, plan.tile)
    table = stage.table(made)
    _open(stage, workspace)
    stage.stream.fork()  # before the kernel: collectives wait for tiles, not for its end
    with phase("signalled_gemm kernel"):  # `report().kernels` says which
        gemm(x, w, out, table, made, shards, layout, plan, stage)
    with stage.stream.stream():
        for number, band in enumerate(made):
            stage.stream.wait_count(stage.count_of(number), band.tiles)  # wait [D]
            collective(band, group)
    stage.clear(len(made))


def gemm(
    x: Tensor, w: Tensor, out: Tensor, table: Tensor, made: tuple[Band, ...], shards: int,
    layout: str, plan: Plan, stage: Stage,
) -> None:  # fmt: skip
    """x times w into `out`, by the kernel that `kernel_of` chooses.

    A kernel makes the bands' tiles in the order of `table` (`table_of`), adds 1 to the counter of a
    tile's band when the tile is stored (signal [D]), leaves the work counter 0, puts no CTA on
    `plan.comm_sms` SMs, and waits for nobody.
    """
    kernel_of(x, w, out.shape[1], made, shards, plan.tile)(
        x, w, out, table=table, tiles=sum(band.tiles for band in made), shards=shards,
        counters=stage.counters, work_counter=stage.work_counter, spare_sms=plan.comm_sms,
        layout=layout, tile=plan.tile,
    )  # fmt: skip


def kernel_of(
    x: Tensor, w: Tensor, N: int, made: tuple[Band, ...], shards: int, tile: Tile
) -> Callable[..., None]:
    """The Hopper kernel, unless `hopper_gemm.refuses_bands` says why not, else the portable one."""
    of_bands = (x.device.type, x.dtype, x.shape[1], N, shards, made, tile)
    if hopper_gemm.refuses_bands(*of_bands) or not launch.has_whole_units(x, w):
        return signalled_gemm
    from flux_megatron.kernels import hopper_signalled_gemm

    return hopper_signalled_gemm.signalled_gemm


def join(workspace: Workspace) -> None:
    """What the current stream gets from now on comes after all collectives of the open call."""
    stage = stage_of(workspace)
    workspace.engine.follow()
    stage.join()
    stage.open = False


def _open(stage: Stage, workspace: Workspace) -> None:
    """Begin a call, after all that earlier calls have enqueued."""
    stage.refuse_second()
    stage.open = True
    workspace.engine.follow()


def stage_of(workspace: Workspace) -> Stage:
    """The stage of a workspace, made at its first call."""
    if "signalled" not in workspace.kept:
        _refuse_capture(workspace.device)
        workspace.kept["signalled"] = Stage(workspace.device)
    stage: Stage = workspace.kept["signalled"]
    return stage


def _refuse_capture(device: torch.device) -> None:
    """Counters, tables and communicators cannot be had during a capture."""
    if capturing(device):
        raise errors.WorkspaceError(
            "a call of signalled is captured that was never made before: make the same call once "
            "before it is captured"
        )


def communicator(workspace: Workspace, comm_sms: int) -> Any:
    """Who runs the collectives: the group, or on NCCL a communicator of the same ranks whose
    kernels hold at most `comm_sms` SMs. Collective at its first call.
    """
    group = workspace.group
    if not comm_sms or workspace.device.type != "cuda":
        return group
    own = stage_of(workspace).communicators
    if comm_sms not in own:
        _refuse_capture(workspace.device)
        own[comm_sms] = _nccl(workspace, comm_sms)
    return own[comm_sms]


def _nccl(workspace: Workspace, comm_sms: int) -> Any:
    """Made here and not by `dist.new_group`: where the default group is bound to a device that
    splits its communicator, for which all ranks of the job would have to come.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = comm_sms
    # NCCL's clusters of 4 CTAs find no 4 free SMs together beside a GEMM, so nothing overlapped:
    # GEMM+RS 8192 x 12288 x 12288 in 8 bands 2321 us, without clusters 1847 (2 x H200, NCCL 2.28.9,
    # h200x2/signalled.jsonl).
    options.config.cga_cluster_size = 1
    options._timeout = timedelta(seconds=timeout_s(workspace.group))
    # both for the watchdog's messages
    options.group_name = f"{workspace.group.group_name} signalled {comm_sms}"  # type: ignore[assignment, unused-ignore]
    options.global_ranks_in_group = dist.get_process_group_ranks(workspace.group)
    store = workspace.agreement.store(f"communicator {comm_sms}")
    rank, world_size = workspace.group.rank(), workspace.world_size
    return dist.ProcessGroupNCCL(store, rank, world_size, options)


@atexit.register
def _let_communicators_go() -> None:
    """Their threads must not outlive the device."""
    for space in workspaces():
        if "signalled" in space.kept:
            space.kept["signalled"].close()
