"""The wait for a collective of a group, also of one to which another rank does not come."""

from __future__ import annotations

import time

import torch.distributed as dist

from flux_megatron.symm.workspace import Workspace

_POLL_S = 1e-4


def wait(work: dist.Work, workspace: Workspace) -> None:
    """Return when the current stream may use the result; raise as `Workspace.check` does.

    On GPUs the stream waits, not the host. gloo holds the host, which could learn nothing meanwhile
    from a rank that makes another call.
    """
    while workspace.device.type == "cpu" and not work.is_completed():
        workspace.check()
        time.sleep(_POLL_S)
    work.wait()
