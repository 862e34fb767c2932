"""Which plans of `hopper` the tuner tries. No kernel runs."""

from __future__ import annotations

from flux_megatron.kernels.sizes import cdiv
from flux_megatron.overlap import hopper
from flux_megatron.problem import Pattern, Problem


def test_rows_in_parts_of_k_are_tried_where_few_rows_have_long_k():
    def tried(M: int, K: int) -> set[tuple[int, int]]:
        problem = Problem(Pattern.AG_GEMM, M, 2 * 5120, K, "bfloat16", 2)
        plans = [plan for plan in hopper.candidates(problem) if plan.splits]
        assert {plan.splits for plan in plans} <= {4}
        return {(plan.tile.block_m, plan.tile.block_n) for plan in plans}

    assert tried(256, 2048) == tried(1024, 8192) == {(128, 256), (128, 128)}
    assert tried(112, 2048) == {(64, 128), (64, 64)}
    assert tried(256, 2047) == tried(112, 1024) == tried(2048, 8192) == set()


def test_short_sums_over_two_ranks_are_pushed_in_quarters_or_by_sms():
    def tried(M: int, K_local: int, world_size: int = 2) -> set[tuple[str, int]]:
        """Transports, and communication tiles of a shard."""
        problem = Problem(Pattern.GEMM_RS, M, 8192, world_size * K_local, "bfloat16", world_size)
        plans = [hopper.default_plan(problem), *hopper.candidates(problem)]
        return {(plan.transport, cdiv(problem.M_shard, plan.comm_rows)) for plan in plans}

    halves, quarters, by_sm = ("copy_engine", 2), ("copy_engine", 4), ("sm", 8)
    assert tried(8192, 1024) == {halves, quarters, by_sm}
    assert tried(8192, 2048) == tried(8192, 4096) == {halves, quarters}
    assert tried(8192, 6144) == tried(8192, 1024, world_size=4) == {halves}
    assert tried(1024, 8192) == {halves, by_sm}
