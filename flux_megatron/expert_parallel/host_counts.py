"""The counts of all ranks on the host, which waits for them: all-to-alls of a library need them."""

from __future__ import annotations

from torch import Tensor

from flux_megatron import errors
from flux_megatron.overlap import collectives
from flux_megatron.overlap.phase import phase
from flux_megatron.symm import signals
from flux_megatron.symm.device import capturing
from flux_megatron.symm.workspace import Workspace


def all_counts(counts: Tensor, rows: int, capacity: int, space: Workspace) -> Tensor:
    """int32 [R sources, R owners, E] on the host; `counts` [R, E] are this rank's, of `rows` rows.

    `CapacityExceeded` where counts do not name the rows that there are, or a rank receives more
    than `capacity`, on all ranks alike. `WorkspaceError` in a capture, which cannot wait.
    """
    if capturing(space.device):
        raise errors.WorkspaceError(
            "this strategy of experts is captured, but its all-to-all needs counts on the host: "
            "capture `fused`, or nothing"
        )
    world_size = space.world_size
    mine = counts.new_empty(counts.numel() + 1)
    mine[:-1], mine[-1] = counts.flatten(), rows
    gathered = mine.new_empty(world_size * mine.numel())
    with phase("exchange of counts"):
        collectives.run(space, collectives.all_gather, gathered, mine)
    reported = gathered.cpu().view(world_size, -1)
    every = reported[:, :-1].view(world_size, *counts.shape)
    named, there = every.sum((1, 2)), reported[:, -1]
    for rank in ((named != there) | (every.amin((1, 2)) < 0)).nonzero()[:1].flatten().tolist():
        _refuse(signals.REFUSED_COUNTS, rank, int(there[rank]), int(named[rank]))
    came = every.sum((0, 2))
    for rank in (came > capacity).nonzero()[:1].flatten().tolist():
        _refuse(signals.REFUSED_CAPACITY, rank, capacity, int(came[rank]))
    return every


def _refuse(kind: int, rank: int, expected: int, seen: int) -> None:
    number = signals.REFUSED_KINDS * rank + kind
    raise errors.CapacityExceeded(signals.refused(number, expected, seen))
