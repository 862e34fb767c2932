"""Collectives of a group in the background, and the wait for one, also of one to which another rank
does not come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from flux_megatron.symm.space import Workspace

_LOOK_S = 0.05


class Alone:
    """Stands for a workspace in a call of this rank alone, which takes the memory of a call with
    the others.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.device, self.group = workspace.device, workspace.group


def start(
    collective: Callable[..., Any], *tensors: torch.Tensor, workspace: Workspace | Alone
) -> dist.Work | None:
    """Begin a collective of torch.distributed's. None for one rank `Alone`, which sends nothing and
    waits for nobody.
    """
    if isinstance(workspace, Alone):
        return None
    work: dist.Work = collective(*tensors, group=workspace.group, async_op=True)
    return work


def wait(work: dist.Work, workspace: Workspace) -> None:
    """Return when the current stream may use the result; raise as `Workspace.check` does.

    On GPUs the stream waits, not the host. gloo holds who waits, so a thread does: the host may
    learn meanwhile that another rank makes another call. gloo does not say whether a reduce-scatter
    is complete. The wait writes the result, so the thread has this one's inference mode.
    """
    if workspace.device.type == "cuda":
        work.wait()
        return
    failures: list[BaseException] = []
    inference = torch.is_inference_mode_enabled()
    thread = threading.Thread(target=_wait, args=(work, inference, failures), daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK_S)
        workspace.check()
    if failures:
        raise failures[0]


def _wait(work: dist.Work, inference: bool, failures: list[BaseException]) -> None:
    try:
        with torch.inference_mode(inference):
            work.wait()
    except BaseException as error:
        failures.append(error)
