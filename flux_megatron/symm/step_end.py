"""The end of a training step: no rank changes a weight or saves a checkpoint before all ranks have
checked their calls.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from flux_megatron import errors
from flux_megatron.symm import objects
from flux_megatron.symm.device import active, copy_engine
from flux_megatron.symm.workspaces import check, living

_ASK_S = 1.0  # seconds between two queries whether another rank has failed


def synchronize() -> None:
    """Wait until all calls, and what the current stream holds, are done; raise as `check` does.

    It raises at once when a wait runs out of time or another rank fails. A plain synchronisation
    would go on waiting for the rest of the stream, such as a collective.
    """
    for device in {space.device for space in living() if space.device.type == "cuda"}:
        with active(device):
            copy_engine(device).follow()
        end = torch.cuda.current_stream(device).record_event()
        asked = time.monotonic()
        while not end.query():
            check()
            if time.monotonic() > asked + _ASK_S:
                asked = time.monotonic()
                for space in living():
                    space.ask()
            time.sleep(2e-5)
    check()


def confirm_step() -> None:
    """Return when all calls of the step are done, and good on every rank of the job. Collective.

    A rank whose wait ran out of time has computed wrong values, which any collective may have sent
    to other ranks. That rank raises `SignalTimeout` or `GroupBroken` at once, all others raise
    `GroupBroken`. Call it after backward, before the optimizer's step.
    """
    failure = None
    try:
        synchronize()
    except errors.FluxError as error:
        failure = error
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = objects.device_of(dist.distributed_c10d._get_default_group(), kind)
    # a kernel fills it: a copy from the host would wait for the stream
    failed = torch.full((1,), int(failure is not None), dtype=torch.int32, device=device)
    reduced = dist.all_reduce(failed, op=dist.ReduceOp.MAX, async_op=True)
    if failure is not None:
        raise failure  # without waiting for the others
    reduced.wait()
    if failed.item():
        for space in living():
            space.ask()
        raise errors.GroupBroken("this step failed on another rank, whose message has the reason")
