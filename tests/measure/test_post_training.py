"""The GRPO-like loop in small, on a CPU: stock and ours agree, and what is wrong is not timed."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from bench_run import run_here
from megatron.core import parallel_state
from ranks import FUSED, run_ranks

from flux_megatron.integration import arm, enabling
from flux_megatron.integration.layers import FluxRowParallelLinear
from flux_megatron.lab.cpu import pretend_cuda
from flux_megatron.lab.measure import post_training
from flux_megatron.lab.measure.post_training_loop import IN_SMALL

STEPS = 5
CASES = post_training.SMALL.split(",")


def loop(rank: int, out: Path, cases: list[str], wrong: bool) -> list[bool]:
    pretend_cuda()
    parallel_state.destroy_model_parallel()
    run = run_here(out)
    right = FluxRowParallelLinear.forward

    def other(self, x):
        y, bias = right(self, x)
        return (y if arm.stock_now() else y + rank), bias

    with mock.patch.object(FluxRowParallelLinear, "forward", other if wrong else right):
        try:
            return [post_training.measure(run, case, STEPS, IN_SMALL) for case in cases]
        finally:
            enabling.disable()
            parallel_state.destroy_model_parallel()


def test_a_row_a_case(tmp_path):
    assert (
        run_ranks(loop, 2, tmp_path / "rows", CASES, False, environment=FUSED) == [[True, True]] * 2
    )
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row["case"] for row in rows] == CASES
    for row in rows:
        apart = row["fallbacks"]
        assert row["overlapped"] == row["calls"] - sum(apart.values()) > 0
        # without sequence parallelism totals are odd too
        assert bool(apart) == (row["case"] == "small whole")
        assert all("rows cannot be divided over 2 ranks" in why for why in apart)
        times = [[sum(one) for one in row[f"times_ms_{arm}"][post_training.SETTLED :]]
                 for arm in ("stock", "ours")]  # fmt: skip
        assert [*map(len, times)] == [STEPS] * 2
        ratios = torch.tensor([stock / ours for stock, ours in zip(*times, strict=True)])
        low, middle, high = row["speedup_step"]
        assert middle == pytest.approx(float(ratios.log().mean().exp()), rel=1e-2)
        assert low < middle < high
        assert row["slowest_step"] == pytest.approx(float(1 / ratios.min()), rel=1e-2)


@pytest.mark.parametrize("case", CASES)
def test_wrong_log_probabilities_are_not_timed(tmp_path, case):
    assert run_ranks(loop, 2, tmp_path / "rows", [case], True, environment=FUSED) == [[False]] * 2
    assert not (tmp_path / "rows").exists()
