"""The end of a training step: no weight changes, and nothing is saved, before all ranks have found
their calls good.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from flux_megatron import errors
from flux_megatron.symm.workspace import synchronize, workspaces


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
