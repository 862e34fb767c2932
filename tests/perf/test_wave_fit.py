"""The terms of `signalled`'s two kernels beside the rows that they were fitted to."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from flux_megatron.kernels import hopper_config, hopper_gemm
from flux_megatron.kernels.signalled_gemm import bands
from flux_megatron.lab.perf.hardware import A100, H200
from flux_megatron.lab.perf.signalled_kernels import HOPPER, PORTABLE, Terms, terms_of
from flux_megatron.lab.perf.wave_groups import COMM_SMS, Curve, WaveModel, model_of
from flux_megatron.problem import Pattern, Plan, Problem, Tile

ROWS = Path(__file__).parents[2] / "docs" / "results" / "h200x2"
FILES = {HOPPER: "signalled_hopper.jsonl", PORTABLE: "signalled.jsonl"}
# Root mean square and largest error; the rate of the GEMM in TFLOP/s: the rows multiply sparse
# integers, which run at the rate of a burst; facts have a sustained one.
STATED = {HOPPER: (0.016, 0.05, 970.6), PORTABLE: (0.016, 0.04, 976.9)}


@dataclass(frozen=True)
class Row:
    """A measured grouping, and its model with the measured curve."""

    shape: tuple[str, int, int]
    us: float
    group_rows: tuple[int, ...]
    model: WaveModel
    K_local: int

    def at_rate(self, tile_us: float, tflops: float) -> float:
        """By the code's terms, at another rate of the GEMM."""
        tile = 2 * 128 * 256 * self.K_local * H200.sms / (tflops * 1e6) + tile_us
        return replace(self.model, tile_us=tile).finish_us(self.group_rows)


def measured(kernel: Terms) -> list[Row]:
    """The groupings with numbers of SMs that the tuner tries, without clusters of NCCL."""
    rows = [json.loads(line) for line in (ROWS / FILES[kernel]).read_text().splitlines()]
    rows = [row for row in rows if row.get("cga_cluster_size", 1) == 1]
    curves = {
        (row["pattern"], row["comm_sms"]): Curve(tuple(row["sizes"]), tuple(row["us"]))
        for row in rows
        if row["table"] == "signalled curve"
    }
    found = []
    for row in rows:
        plan = json.loads(row["plan"]) if row["table"] == "signalled" and row["plan"] else {}
        made_by = row.get("kernel") or kernel.name  # the first rows have one kernel a file
        if plan.get("comm_sms") not in COMM_SMS or made_by != kernel.name:
            continue
        like = Plan("signalled", tile=Tile(**plan["tile"]), comm_sms=plan["comm_sms"])
        asked = Problem(Pattern(row["pattern"]), row["M"], row["N"], row["K"], "bfloat16", 2)
        facts = replace(H200, hopper=kernel is HOPPER)
        model = model_of(asked, like, facts, curve=curves[row["pattern"], plan["comm_sms"]])
        shape = (row["pattern"], row["M"], row["K"])
        found.append(Row(shape, row["median_us"], tuple(plan["group_rows"]), model, asked.K_local))
    return found


def logs(rows: Sequence[Row], predict: Callable[[Row], float]) -> list[float]:
    """Relative errors."""
    return [math.log(predict(row) / row.us) for row in rows]


def by_shape(rows: Sequence[Row]) -> dict[tuple[str, int, int], list[Row]]:
    return {shape: [row for row in rows if row.shape == shape] for shape in {r.shape for r in rows}}


def regret(rows: Sequence[Row], predict: Callable[[Row], float]) -> float:
    """How much longer the grouping of these that is predicted best takes than the best."""
    return min(rows, key=predict).us / min(row.us for row in rows) - 1


@pytest.mark.parametrize("kernel", FILES, ids=lambda kernel: kernel.name)
def test_the_terms_are_the_fit_and_as_good_as_stated(kernel):
    rows, (rms, largest, rate) = measured(kernel), STATED[kernel]
    assert len(rows) == {HOPPER: 72, PORTABLE: 28}[kernel]
    found = logs(rows, lambda row: row.at_rate(kernel.tile_us, rate))
    assert math.sqrt(sum(error**2 for error in found) / len(found)) <= rms
    assert max(map(abs, found)) <= largest


def test_the_choice_among_the_measured_groupings():
    """By the facts, whose rate is not that of the rows, a choice costs up to 8 %."""
    for kernel in FILES:
        lost = {
            shape: regret(rows, lambda row: row.model.finish_us(row.group_rows))
            for shape, rows in by_shape(measured(kernel)).items()
        }
        *others, most = sorted(lost.values())
        assert max(others) <= 0.04, lost
        assert most <= 0.08, lost


def test_the_predictor_knows_which_kernel_runs(monkeypatch):
    """As the call itself decides it, on compute capability 9."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    hopper_gemm.refuses_bands.cache_clear()
    tile, seen = replace(hopper_config.TILE, group_m=16), set()
    changed = [
        {}, {"M": 800}, {"M": 1000}, {"N": 252}, {"K": 1032}, {"dtype": "float32"},
        {"tile": replace(tile, block_n=128)}, {"tile": hopper_config.TILE},
        {"tile": replace(tile, num_stages=4)}, {"tile": replace(tile, tma=False)},
        {"group_rows": (144,)}, {"group_rows": (128, 256)}, {"group_rows": (512, 512)},
    ]  # fmt: skip
    for pattern in (Pattern.GEMM_RS, Pattern.GEMM_AR):
        for change in changed:
            given = {"M": 1024, "N": 512, "K": 1024, "dtype": "bfloat16", **change}
            plan = Plan("signalled", tile=given.pop("tile", tile), comm_sms=8)
            plan = replace(plan, group_rows=given.pop("group_rows", ()))
            asked = Problem(pattern, **given, world_size=2)
            shards = 2 if asked.spec.scatters else 1
            made = bands(asked.M // shards, asked.N, shards, plan.group_rows, plan.tile)
            dtype = getattr(torch, asked.dtype)
            refused = hopper_gemm.refuses_bands(
                "cuda", dtype, asked.K_local, asked.N, shards, made, plan.tile
            )
            expected = PORTABLE if refused else HOPPER
            assert terms_of(asked, plan, H200) == expected, (pattern, change, refused)
            assert terms_of(asked, plan, A100) == PORTABLE
            seen.add(expected)
    hopper_gemm.refuses_bands.cache_clear()
    assert seen == {HOPPER, PORTABLE}
