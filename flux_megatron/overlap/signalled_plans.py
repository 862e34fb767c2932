"""Plans of `signalled`: which rows each band has, and how many SMs collectives have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flux_megatron.kernels.hopper import config as hopper_config
from flux_megatron.kernels.sizes import cdiv
from flux_megatron.overlap import fused
from flux_megatron.problem import Plan, Problem

# Rows of bands, as shares of all. A reduction's first and last band are exposed. A gather's GEMMs
# begin with the local shard, so its last one alone is.
GROUPS, EIGHT, SIXTEEN = (1,) * 4, (1,) * 8, (1,) * 16
EDGES = 1, 2, 4, 4, 4, 4, 4, 4, 2, 2, 1
# Communicators take turns at bands, each with so many SMs. A collective begins and ends beside
# another, and several get more of a socket than one. Two H200 that NCCL joins by host memory,
# GEMM+RS 16384 x 8192 x 8192 in eight equal bands by 4 SMs: 5868 us by one communicator, 5484 by
# two. Beside 4 SMs of collectives a GEMM takes a fifth longer, beside 2 less, but one collective
# then takes a third longer (h200x2/machines.jsonl).
SMS_OF_ONE = 2


def default_plan(problem: Problem) -> Plan:
    """The first of `candidates`."""
    return candidates(problem)[0]


def why_not(problem: Problem, plan: Plan) -> str | None:
    """Why no call of the problem has this plan, or None. A library's GEMM has its own tiles."""
    if problem.spec.gathers and not plan.comm_sms:
        return None
    return fused.why_not(problem, plan)


def candidates(problem: Problem) -> list[Plan]:
    """Plans worth measuring where no model predicts better ones, the rule's first: bands, and how
    many communicators. Without one a gather runs beside a library's GEMMs, which hold all SMs, but
    multiply the rows of several ranks at once, which ours do not.
    """
    if problem.spec.gathers:
        wanted = [(EIGHT, 2), (GROUPS, 1), (EIGHT, 3)]
        wanted.insert(0 if problem.world_size > 2 else len(wanted), (GROUPS, 0))
    else:
        wanted = [(shares, 3) for shares in (EDGES, SIXTEEN, GROUPS)]
    return [_plan(problem, *one) for one in wanted]


def _plan(problem: Problem, shares: Sequence[int], communicators: int) -> Plan:
    tile = fused.default_plan(problem).tile
    if tile == hopper_config.TILE:
        tile = replace(tile, group_m=16)  # as `hopper` has it
    group_rows = _group_rows(rows_of(problem), tile.block_m, shares)
    comm_sms = communicators * SMS_OF_ONE
    return Plan("signalled", tile=tile, group_rows=group_rows, comm_sms=comm_sms)


def rows_of(problem: Problem) -> int:
    """That `group_rows` divides."""
    return problem.M_shard if problem.spec.scatters or problem.spec.gathers else problem.M


def for_rows(plan: Plan, problem: Problem, M: int) -> Plan:
    """The plan of M rows as one of the problem's, with bands of the same shares."""
    rows = rows_of(replace(problem, M=M))
    shares = (*plan.group_rows, rows - sum(plan.group_rows))
    group_rows = _group_rows(rows_of(problem), plan.tile.block_m, shares)
    return replace(plan, group_rows=group_rows)


def _group_rows(rows: int, block_m: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Of all bands but the last: whole tiles, as long as there are some."""
    tiles, total, found = cdiv(rows, block_m), sum(shares), []
    left = tiles
    for share in shares[:-1]:
        taken = cdiv(tiles * share, total)
        if taken >= left:
            break
        found.append(taken * block_m)
        left -= taken
    return tuple(found)
