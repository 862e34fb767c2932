"""The end of a training step: no weight changes, and nothing is saved, before all ranks have found
their calls good.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from flux_megatron import errors
from flux_megatron.symm.device import copy_engine
from flux_megatron.symm.workspace import check, workspaces

_ASK_S = 1.0  # between two questions whether another rank has failed


def synchronize() -> None:
    """Wait until all calls, and what the current stream holds, are done; raise as `check` does.

    It raises at once when a wait runs out of time or another rank fails, where a plain
    synchronisation would wait for whatever else the stream waits for, such as a collective.
    """
    for device in {space.device for space in workspaces() if space.device.type == "cuda"}:
        copy_engine(device).follow()
        end = torch.cuda.current_stream(device).record_event()
        asked = time.monotonic()
        while not end.query():
            check()
            if time.monotonic() > asked + _ASK_S:
                asked = time.monotonic()
                for space in workspaces():
                    space.ask()
            time.sleep(2e-5)
    check()


def confirm_step() -> None:
    """Return when all calls of the step are done, and good on every rank of the job. Collective.

    What a rank computed after a wait of its ran out of time may have reached any other, also by
    collectives that are not ours. `SignalTimeout` or `GroupBroken` on that rank, at once, and
    `GroupBroken` on all others. Call it after backward, before the optimizer's step.
    """
    failure = None
    try:
        synchronize()
    except errors.FluxError as error:
        failure = error
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # filled by a kernel: a copy from the host would wait for the stream
    failed = torch.full((1,), int(failure is not None), dtype=torch.int32, device=device)
    told = dist.all_reduce(failed, op=dist.ReduceOp.MAX, async_op=True)
    if failure is not None:
        raise failure  # whether or not the others come to hear of it
    told.wait()
    if failed.item():
        for space in workspaces():
            space.ask()
        raise errors.GroupBroken("this step failed on another rank, whose message has the reason")
