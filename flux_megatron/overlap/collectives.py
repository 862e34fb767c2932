"""Collectives of a group in the background as steps of a program, and the wait for one, also of one
to which another rank does not come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flux_megatron.symm.groups import name_of
from flux_megatron.symm.program import CallProgram
from flux_megatron.symm.steps import Slot
from flux_megatron.symm.workspace import Workspace

_LOOK_S = 0.05


# torch 2.13 warns of the second names in each call, which takes the host as long as a small step.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_fp8(out: Tensor, rows: Tensor, **options: Any) -> dist.Work | None:
    """No collective knows these dtypes."""
    return all_gather(out.view(torch.uint8), rows.view(torch.uint8), **options)


def start(
    p: CallProgram, name: str, collective: Callable[..., dist.Work | None], *slots: Slot
) -> None:
    """Begin a collective of torch.distributed's with these tensors, as a phase of this name."""
    with p.phase(name):
        p.host(partial(_start, collective), *slots)


def _start(collective: Callable[..., dist.Work | None], call: Any, *tensors: Tensor) -> None:
    space = call.space
    if not space.alone:
        call.works.append(collective(*tensors, group=space.group, async_op=True))


def wait_for(p: CallProgram) -> None:
    """Go on behind the collective that the program has started, the first of several."""
    with p.phase("wait"):
        p.host(_wait_for)


def _wait_for(call: Any) -> None:
    if call.works:
        wait(call.works.pop(0), call.space)


def run(
    workspace: Workspace, collective: Callable[..., dist.Work | None], *given: Any, **options: Any
) -> None:
    """A collective of the group, which the current stream waits for; raises as `wait` does."""
    work = collective(*given, group=workspace.group, async_op=True, **options)
    if work is not None:
        wait(work, workspace)


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
    began = time.monotonic()
    thread.join(_LOOK_S)
    while thread.is_alive():
        workspace.check()
        if time.monotonic() - began > (bound_s := workspace.timeout_ns * 1e-9):
            waiter = f"rank {workspace.rank} of group {name_of(workspace.group)}"
            workspace.end_late(f"{waiter} waited {bound_s:g} s for a collective", half_made=True)
        thread.join(_LOOK_S)
    if failures:
        workspace.check()
        raise failures[0]


def _wait(work: dist.Work, inference: bool, failures: list[BaseException]) -> None:
    try:
        with torch.inference_mode(inference):
            work.wait()
    except BaseException as error:
        failures.append(error)
