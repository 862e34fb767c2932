"""Bands of `signalled`: shares of the rows, and how many communicators take turns at them.

No torch: the cost model reads them too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from flux_megatron.problem import Problem

# Rows of bands, as shares of all. A reduction's first and last band are exposed. A gather's GEMM
# begins with the local shard, so its last one alone is.
TWO, GROUPS, SIXTEEN = (1,) * 2, (1,) * 4, (1,) * 16
EDGES = 1, 2, 4, 4, 4, 4, 4, 4, 2, 2, 1
TAPERED = 4, 4, 4, 2, 1, 1
# Communicators take turns at bands, each with so many SMs. A collective begins and ends beside
# another, and several get more of a socket than one. Two H200 that NCCL joins by host memory,
# GEMM+RS 16384 x 8192 x 8192 in eight equal bands by 4 SMs: 5868 us by one communicator, 5484 by
# two. Beside 4 SMs of collectives a GEMM takes a fifth longer, beside 2 less, but one collective
# then takes a third longer (h200x2/machines.jsonl).
SMS_OF_ONE = 2
# That a gather's GEMM leaves to NCCL's kernels of other groups (decision 0008).
SMS_OF_OTHERS = 2


def shares_of(problem: Problem) -> list[tuple[Sequence[int], int]]:
    """Of the candidates: bands, and how many communicators.

    One communicator is for a gather shorter than its GEMM, three for a slower link; few bands are
    for a host that is late: in four a gather through host memory takes it .3 to .9 ms, in six .4
    to 1.1 (2 x H200, NCCL 2.28.9, 2026-11-30, h200x2/machines.jsonl). More
    than two ranks were not measured.
    """
    if not problem.spec.gathers:
        return [(EDGES, 3), (SIXTEEN, 3), (GROUPS, 3), (TWO, 2)]
    return [(TAPERED, 2), (GROUPS, 1), (TAPERED, 3), (GROUPS, 2)]


def rows_of(problem: Problem) -> int:
    """That `group_rows` divides."""
    return problem.M_shard if problem.spec.divided else problem.M


def group_rows_of(rows: int, block_m: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Of all bands but the last: whole tiles, as long as there are some. The last has the rows that
    make no tile beside its own, for a band of them alone is none for Hopper's kernel.
    """
    tiles, total, found = max(1, rows // block_m), sum(shares), []
    left = tiles
    for share in shares[:-1]:
        taken = math.ceil(tiles * share / total)
        if taken >= left:
            break
        found.append(taken * block_m)
        left -= taken
    return tuple(found)
