"""`--compare`: the same run on stock Megatron layers, both curves, and a verdict.

float32: no step's loss may differ from stock by more than a tolerance. Lower precision: two correct
implementations drift apart, so stock Megatron is also trained with its sums in other orders, and
our curve must be no further from one of the stock curves than stock curves are from each other.
"""

from __future__ import annotations

import json
import math
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from flux_megatron.errors import BadInput
from flux_megatron.lab.train import run_folder
from flux_megatron.lab.train.config import TrainConfig
from flux_megatron.lab.train.run_folder import show

FLOAT32_TOLERANCE = 1e-5  # nats; both runs do the same sums, a few of them in another order
STOCK_ARMS = ("stock", "stock-rank-order", "stock-reverse-order")
MIN_RANKS_TO_REORDER = 3  # a sum of two has one order
COUNTS = ("calls", "fallbacks", "overlapped", "chosen_sequential", "eligible", "silent")

Rows = list[dict[str, Any]]


def arms_of(config: TrainConfig) -> list[TrainConfig]:
    """What to train, ours first; `BadInput` where that would show nothing."""
    if config.layers != "flux":
        raise BadInput(f"layers={config.layers} given, flux expected: --compare trains stock too")
    stock = STOCK_ARMS[:1] if config.train.dtype == "float32" else STOCK_ARMS
    if len(stock) > 1 and config.parallel.tp < MIN_RANKS_TO_REORDER:
        raise BadInput(
            f"--compare in {config.train.dtype} with parallel.tp={config.parallel.tp} given, "
            f"{MIN_RANKS_TO_REORDER} or more expected, or float32: a sum of two has one order, so "
            "stock Megatron shows no spread to measure against"
        )
    return [config, *(config.model_copy(update={"layers": arm}) for arm in stock)]


def conclude(out: Path, folders: list[Path]) -> bool:
    """Judge the finished arms of these folders: compare.json and compare.png in `out`; whether ours
    agrees with stock, and every call overlapped or has a reason.
    """
    curves = {folder.name: run_folder.metrics(folder) for folder in folders}
    result = judge_exact(curves) if len(folders) == 2 else judge_spread(curves)
    summary = json.loads((out / "flux" / run_folder.SUMMARY).read_text())
    result |= {key: summary[key] for key in COUNTS}
    result["passed"] = result["losses_agree"] and result["silent"] == 0
    run_folder.write_json(out / "compare.json", result)
    run_folder.draw(out / "compare.png", curves, summary["run"])
    show("our layers against stock Megatron", result)
    print(f"verdict: {'same' if result['passed'] else 'DIFFERENT'}, curves: {out / 'compare.png'}")
    return bool(result["passed"])


def judge_exact(curves: dict[str, Rows]) -> dict[str, Any]:
    """Largest difference of any step's loss, against a fixed tolerance."""
    facts = _facts(curves)
    agree = facts["largest_difference"] <= FLOAT32_TOLERANCE
    return facts | {"tolerance": FLOAT32_TOLERANCE, "losses_agree": agree}


def judge_spread(curves: dict[str, Rows]) -> dict[str, Any]:
    """Distance to the nearest stock curve, against the widest between two stock curves.

    A distance is the mean over the steps of |loss difference|.
    """
    stock = [arm for arm in curves if arm != "flux"]
    ours = {arm: fmean(_differences(curves["flux"], curves[arm])) for arm in stock}
    pairs = combinations(stock, 2)
    among = {f"{a} / {b}": fmean(_differences(curves[a], curves[b])) for a, b in pairs}
    nearest, spread = min(ours.values()), max(among.values())
    judged = {"mean_difference_to": ours, "stock_spread": among, "tolerance": spread}
    return _facts(curves) | judged | {"losses_agree": nearest <= spread}


def _facts(curves: dict[str, Rows]) -> dict[str, Any]:
    return {
        "steps": len(curves["flux"]),
        "final_loss": {arm: rows[-1]["loss"] for arm, rows in curves.items()},
        "largest_difference": max(_differences(curves["flux"], curves["stock"])),
    }


def _differences(ours: Rows, stock: Rows) -> list[float]:
    """|loss difference| per step; infinite where it is not a number, so that this never passes."""
    steps = [row["step"] for row in ours]
    if not steps or steps != [row["step"] for row in stock]:
        raise BadInput(f"the runs have different steps: {len(ours)} and {len(stock)} rows")
    pairs = zip(ours, stock, strict=True)
    differences = [abs(a["loss"] - b["loss"]) for a, b in pairs]
    return [d if math.isfinite(d) else math.inf for d in differences]
