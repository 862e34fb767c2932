"""The symmetric memory and the copy engine of a device, by its type."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch.distributed import ProcessGroup

from flux_megatron import settings
from flux_megatron.symm import cpu_backend, cuda_backend, cuda_memory, enqueue, mailbox
from flux_megatron.symm.buffer import SymmetricBuffer
from flux_megatron.symm.copy_engine import CopyEngine
from flux_megatron.symm.places import Missing


def allocate(
    size_bytes: int, group: ProcessGroup, device: torch.device, mailboxes: bool = False
) -> SymmetricBuffer:
    """Zeroed symmetric memory over `group`, or with mailboxes in the host's memory. Collective:
    every rank calls it with the same size.
    """
    if mailboxes:
        return mailbox.allocate(size_bytes, group, device)
    if device.type == "cuda":
        return cuda_memory.allocate(size_bytes, group, device)
    return cpu_backend.allocate(size_bytes, group)


def missing(group: ProcessGroup, device: torch.device) -> Missing | None:
    """Why ranks of one machine cannot share the device's memory, tried once; None if they can.
    Collective.
    """
    if device.type == "cpu" or group.size() == 1:
        return None
    reason = cuda_memory.why_not_shared(group, device)
    return Missing(reason, mailbox.why_none(group, device) is None) if reason else None


def active(device: torch.device) -> AbstractContextManager[object]:
    """`with active(device):` what is made or enqueued without naming a device is of this one,
    whatever the calling thread has used before.
    """
    return nullcontext() if is_active(device) else torch.cuda.device(device)


def is_active(device: torch.device) -> bool:
    """Whether that is so already."""
    return device.type != "cuda" or torch.cuda.current_device() == device.index


def capturing(device: torch.device) -> bool:
    """Whether what is enqueued now goes into a CUDA graph."""
    with active(device):
        return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@cache
def copy_engine(device: torch.device) -> CopyEngine:
    """The copy engine of a device: one stream of pushes for the whole process."""
    return _engine(device)


@cache
def communication_stream(device: torch.device) -> CopyEngine:
    """A stream of a device for collectives that wait for a count: pushes must not stand behind
    them.
    """
    return _engine(device)


@cache
def flag_stream(device: torch.device) -> CopyEngine:
    """A stream of a device that waits for collectives and flags what has come: the next collective
    waits for none of them.
    """
    return _engine(device)


@cache
def arrival_stream(device: torch.device) -> CopyEngine:
    """A stream of a device that brings what has come to its mailboxes."""
    return _engine(device)


def _engine(device: torch.device) -> CopyEngine:
    if device.type == "cpu":
        return cpu_backend.CpuCopyEngine()
    engine = cuda_backend.CudaCopyEngine(device)
    engine.runs_lists = settings.get().native
    if engine.runs_lists and (reason := enqueue.unavailable()):
        engine.runs_lists = False
        warnings.warn(
            f"flux_megatron: Python makes the driver calls, which takes the host longer: {reason}",
            stacklevel=2,
        )
    return engine
