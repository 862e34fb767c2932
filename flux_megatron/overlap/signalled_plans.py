"""Plans of `signalled`: which rows each band has, and how many SMs collectives have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flux_megatron.kernels.hopper import config as hopper_config
from flux_megatron.overlap import fused
from flux_megatron.overlap.band_shares import SMS_OF_ONE, group_rows_of, rows_of, shares_of
from flux_megatron.problem import Plan, Problem


def default_plan(problem: Problem) -> Plan:
    """The first of `candidates`."""
    return candidates(problem)[0]


why_not = fused.why_not


def candidates(problem: Problem) -> list[Plan]:
    """Plans worth measuring where no model predicts better ones, the rule's first."""
    return [_plan(problem, *one) for one in shares_of(problem)]


def _plan(problem: Problem, shares: Sequence[int], communicators: int) -> Plan:
    tile = fused.default_plan(problem).tile
    if tile == hopper_config.TILE:
        tile = replace(tile, group_m=16)  # as `hopper` has it
    group_rows = group_rows_of(rows_of(problem), tile.block_m, shares)
    comm_sms = communicators * SMS_OF_ONE
    return Plan("signalled", tile=tile, group_rows=group_rows, comm_sms=comm_sms)


def for_rows(plan: Plan, problem: Problem, M: int) -> Plan:
    """The plan of M rows as one of the problem's, with bands of the same shares."""
    rows = rows_of(replace(problem, M=M))
    shares = (*plan.group_rows, rows - sum(plan.group_rows))
    group_rows = group_rows_of(rows_of(problem), plan.tile.block_m, shares)
    return replace(plan, group_rows=group_rows)
