"""Which copies between GPUs are made by SMs.

The driver leaves copies to GPUs that a process sees to a copy engine, and copies within a GPU to
SMs, by three of its calls, a hint to overlap included (one H200, 2026-11-29, h200/checks.jsonl). So
it does, it seems, with memory of a GPU that a process does not see, as where each rank sees one:
GEMM+RS by copy engines takes 160 us there instead of 108 (M 8192, N = K = 2048,
h200x2/checks.jsonl). A kernel that holds all SMs until such a copy has come waits forever: so races
of this shape stood still in verl's workers, and not at M = 4096, where 128 of 132 SMs wait.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

SMS = 4  # that our kernels leave to them

_made_by_sms: set[torch.device] = set()


def note_peers(
    device: torch.device, own: str, others: Sequence[str], seen: Collection[str]
) -> None:
    """SMs copy from the GPU `own` to one of `others` that is the same, or that this process has not
    `seen`. All are names of GPUs.
    """
    if any(one == own or one not in seen for one in others):
        _made_by_sms.add(device)


def spare_sms(device: torch.device) -> int:
    """How many SMs a kernel leaves free that may wait for copies."""
    return SMS if device in _made_by_sms else 0
