"""The simulator beside training runs that others have published."""

from __future__ import annotations

import pytest

from flux_megatron.lab.perf import flops, published_runs, step
from flux_megatron.lab.perf.published_runs import RUNS, workload


@pytest.mark.parametrize(
    ("run", "published"), [*zip(RUNS, (0.415, 0.514, 0.560, 0.563), strict=True)]
)
def test_seconds_and_mfu_of_megatrons_readme_are_of_the_same_runs(run, published):
    """It counts attention's scores whole, and the padded vocabulary."""
    one = workload(run, full=False)
    counted = flops.mfu(one, run.selective_s)
    scores = 6 * run.layers * 2048**2 * run.hidden * run.batch
    whole = counted * (1 + scores / flops.model_flops(one))
    assert whole == pytest.approx(published, abs=0.005)


@pytest.mark.parametrize("pp", [4, 12])
def test_hopper_is_predicted_near_megatrons_own_figure(pp):
    found = step.predict(published_runs.on_hopper(pp)).mfu
    assert found == pytest.approx(published_runs.HOPPER_MFU, abs=0.03)
