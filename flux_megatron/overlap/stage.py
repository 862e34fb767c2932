"""What the calls of `signalled` share in a group, those of experts too: counters, a stream, and
communicators whose kernels hold few SMs.
"""

from __future__ import annotations

import atexit
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flux_megatron import errors
from flux_megatron.kernels.portable.gathered_gemm import WORDS
from flux_megatron.kernels.portable.signalled_gemm import Band, table_of
from flux_megatron.overlap.band_shares import SMS_OF_ONE
from flux_megatron.problem import MAX_GROUPS
from flux_megatron.symm.device import capturing, communication_stream, flag_stream
from flux_megatron.symm.groups import is_listed, name_of, timeout_s
from flux_megatron.symm.lasting import lasting
from flux_megatron.symm.signals import WORK_WORDS
from flux_megatron.symm.workspace import Workspace
from flux_megatron.symm.workspaces import workspaces


class Stage:
    """What the calls of a workspace share: counters that are 0 between calls, a stream, and one
    open call.
    """

    open: object  # the call that is, or None

    @lasting()
    def __init__(self, device: torch.device) -> None:
        self.stream = communication_stream(device)
        self.counters = torch.zeros(MAX_GROUPS, dtype=torch.int32, device=device)
        self.flags = flag_stream(device)
        self.words = torch.zeros(WORDS, dtype=torch.int32, device=device)  # of `gathered_gemm`
        self.work_counter = torch.zeros(WORK_WORDS, dtype=torch.int32, device=device)
        self.open = None
        self.on_group = False  # whether collectives of its calls are the group's own
        self.communicators: dict[tuple[int, int], Any] = {}  # by the SMs that they hold, and turn
        self._device = device
        self._captured: dict[int, Tensor] = {}  # tables, by the addresses that graphs know

    @lasting()
    def table(self, of_bands: tuple[Band, ...]) -> Tensor:
        """The kernel's table of the bands."""
        _refuse_capture(self._device)
        return table_of(of_bands, self._device)

    @property
    def held_by_graph(self) -> bool:
        return bool(self._captured)

    def join(self) -> None:
        """What the current stream gets from now on comes after all collectives so far."""
        self.flags.join()
        self.stream.join()

    def close(self) -> None:
        """A peer that is gone is not waited for."""
        while self.communicators:
            _, own = self.communicators.popitem()
            own.abort()

    def begin(self, call: object) -> None:
        """Open a call; no second one beside it."""
        if self.open is not None:
            raise errors.WorkspaceError("a GEMM of signalled was begun while another was open")
        self.open = call

    def hold(self, table: Tensor) -> None:
        """A graph captures a call with it."""
        self._captured[table.data_ptr()] = table

    def count_of(self, band: int) -> int:
        """The address of a band's counter."""
        return self.counters.data_ptr() + band * self.counters.element_size()


def join(workspace: Workspace) -> None:
    """What the current stream gets from now on comes after all collectives of the open call."""
    stage = stage_of(workspace)
    workspace.engine.follow()
    stage.join()
    stage.open = None


def stage_of(workspace: Workspace) -> Stage:
    """The stage of a workspace, made at its first call."""
    if workspace.stage is None:
        _refuse_capture(workspace.device)
        workspace.stage = Stage(workspace.device)
    return workspace.stage


def _refuse_capture(device: torch.device) -> None:
    """Counters, tables and communicators cannot be had during a capture."""
    if capturing(device):
        raise errors.WorkspaceError(
            "a call of signalled is captured that was never made before: make the same call once "
            "before it is captured"
        )


def communicators(workspace: Workspace, comm_sms: int) -> list[Any]:
    """Who move bands, in turns, in so many SMs."""
    turns = max(1, comm_sms // SMS_OF_ONE)
    return [communicator(workspace, min(SMS_OF_ONE, comm_sms), turn) for turn in range(turns)]


def communicator(workspace: Workspace, comm_sms: int, turn: int = 0) -> Any:
    """Who runs the collectives: the group, or on NCCL a communicator of the same ranks whose
    kernels hold at most `comm_sms` SMs, another one for each `turn`. Collective at its first call.
    """
    group = workspace.group
    if not comm_sms or workspace.device.type != "cuda":
        stage_of(workspace).on_group = True
        return group
    own = stage_of(workspace).communicators
    if (comm_sms, turn) not in own:
        _refuse_capture(workspace.device)
        own[comm_sms, turn] = _nccl(workspace, comm_sms, turn)
    return own[comm_sms, turn]


def _nccl(workspace: Workspace, comm_sms: int, turn: int) -> Any:
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
    options.group_name = f"{name_of(workspace.group)} signalled {comm_sms} {turn}"  # type: ignore[assignment, unused-ignore]
    if is_listed(workspace.group):
        options.global_ranks_in_group = dist.get_process_group_ranks(workspace.group)
    store = workspace.agreement.store(f"communicator {comm_sms} {turn}")
    rank, world_size = workspace.group.rank(), workspace.world_size
    return dist.ProcessGroupNCCL(store, rank, world_size, options)


@atexit.register
def _let_communicators_go() -> None:
    """Their threads must not outlive the device."""
    for space in workspaces():
        if space.stage is not None:
            space.stage.close()
