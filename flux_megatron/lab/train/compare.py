"""`--compare`: the same run on stock Megatron layers, both curves, and a verdict. No torch.

float32: no step's loss may differ from stock by more than a tolerance. Lower precision: two correct
implementations drift apart, so stock Megatron is also trained with its sums in other orders, and
our curve must be no further from one of the stock curves than stock curves are from each other.
"""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flux_megatron.lab.train import curves as pictures
from flux_megatron.lab.train import launcher, run_folder
from flux_megatron.lab.train.config import ConfigError, TrainConfig

FLOAT32_TOLERANCE = 1e-5  # nats; both runs do the same sums, a few of them in another order
STOCK_ARMS = ("stock", "stock-rank-order", "stock-reverse-order")
MIN_RANKS_TO_REORDER = 3  # a sum of two has one order
COUNTS = ("calls", "fallbacks", "overlapped", "chosen_sequential", "eligible", "silent")

Rows = list[dict[str, Any]]


def compare(config: TrainConfig, out: Path, resume: bool) -> int:
    """Train every arm in OUT/ARM.

    0 if ours agrees with stock and every call overlapped or has a reason, else 1 (130 after
    Ctrl-C).
    """
    if config.layers != "flux":
        raise ConfigError(
            f"layers={config.layers}: --compare trains both kinds, leave layers at flux"
        )
    low_precision = config.train.dtype != "float32"
    if low_precision and config.parallel.tp < MIN_RANKS_TO_REORDER:
        raise ConfigError(
            f"--compare in {config.train.dtype} needs parallel.tp >= {MIN_RANKS_TO_REORDER}: a sum "
            "of two has one order, so stock Megatron shows no spread to measure against. "
            "Use float32 or more ranks."
        )
    if not resume:
        run_folder.refuse_used(out, resume)
    else:
        run_folder.refuse_used(out / "flux", resume)  # the first arm
    stock_arms = STOCK_ARMS if low_precision else STOCK_ARMS[:1]
    data = config.data.model_copy(update={"cache": config.data.cache or out / "cache"})
    for arm in ("flux", *stock_arms):
        run = config.model_copy(update={"layers": arm, "data": data})
        begun = (out / arm / run_folder.CONFIG).is_file()
        code = launcher.train(run, out / arm, resume and begun)
        if code:
            return code
    return conclude(out, stock_arms)


def conclude(out: Path, stock_arms: tuple[str, ...]) -> int:
    """Judge the finished arms in `out`: table, compare.json, compare.png, exit code."""
    curves = {arm: run_folder.metrics(out / arm) for arm in ("flux", *stock_arms)}
    result = judge_exact(curves) if len(stock_arms) == 1 else judge_spread(curves)
    summary = run_folder.read_json(out / "flux" / "summary.json")
    counts = {key: summary[key] for key in COUNTS}
    result |= counts
    result["passed"] = result["losses_agree"] and counts["silent"] == 0
    run_folder.write_json(out / "compare.json", result)
    title = summary.get("run", "")  # a finished run of before 0.2 has none
    of = "any step" if len(stock_arms) == 1 else "the mean"
    pictures.draw_compared(out / "compare.png", curves, result["tolerance"], of, title)
    console = Console()
    console.print(_table(result))
    console.print(f"curves: {out / 'compare.png'}", soft_wrap=True)
    return 0 if result["passed"] else 1


def judge_exact(curves: dict[str, Rows]) -> dict[str, Any]:
    """Largest difference of any step's loss, against a fixed tolerance."""
    differences = _differences(curves["flux"], curves["stock"])
    largest = max(differences)
    return {
        "steps": len(differences),
        "final_loss": {arm: rows[-1]["loss"] for arm, rows in curves.items()},
        "largest_difference": largest,
        "tolerance": FLOAT32_TOLERANCE,
        "losses_agree": largest <= FLOAT32_TOLERANCE,
    }


def judge_spread(curves: dict[str, Rows]) -> dict[str, Any]:
    """Distance to the nearest stock curve, against the widest between two stock curves.

    A distance is the mean over the steps of |loss difference|.
    """
    stock = [arm for arm in curves if arm != "flux"]
    ours = {arm: _mean_difference(curves["flux"], curves[arm]) for arm in stock}
    among = {
        f"{a} / {b}": _mean_difference(curves[a], curves[b]) for a, b in combinations(stock, 2)
    }
    nearest, spread = min(ours.values()), max(among.values())
    return {
        "steps": len(curves["flux"]),
        "final_loss": {arm: rows[-1]["loss"] for arm, rows in curves.items()},
        "largest_difference": max(_differences(curves["flux"], curves["stock"])),
        "mean_difference_to": ours,
        "stock_spread": among,
        "tolerance": spread,
        "losses_agree": nearest <= spread,
    }


def _differences(ours: Rows, stock: Rows) -> list[float]:
    """|loss difference| per step; infinite where it is not a number, so that this never passes."""
    steps = [row["step"] for row in ours]
    if not steps or steps != [row["step"] for row in stock]:
        raise ConfigError(f"the runs have different steps: {len(ours)} and {len(stock)} rows")
    pairs = zip(ours, stock, strict=True)
    differences = [abs(a["loss"] - b["loss"]) for a, b in pairs]
    return [d if math.isfinite(d) else math.inf for d in differences]


def _mean_difference(ours: Rows, stock: Rows) -> float:
    differences = _differences(ours, stock)
    return sum(differences) / len(differences)


def _table(result: dict[str, Any]) -> Table:
    table = Table(
        title="our layers against stock Megatron", title_justify="left", show_header=False
    )
    table.add_row("steps", str(result["steps"]))
    for arm, loss in result["final_loss"].items():
        table.add_row(f"final loss, {arm}", f"{loss:.6f}")
    table.add_row("largest |loss difference|", f"{result['largest_difference']:.3e}")
    for arm, difference in result.get("mean_difference_to", {}).items():
        table.add_row(f"mean |difference| to {arm}", f"{difference:.3e}")
    for pair, difference in result.get("stock_spread", {}).items():
        table.add_row(f"mean |difference| {pair}", f"{difference:.3e}")
    table.add_row("tolerance", f"{result['tolerance']:.3e}")
    for name, count in result["calls"].items():
        table.add_row(f"calls: {name}", str(count))
    for name, count in result["fallbacks"].items():
        table.add_row(f"fallback: {name}", str(count))
    table.add_row("overlapped / eligible calls", f"{result['overlapped']} / {result['eligible']}")
    table.add_row("sequential by their plan", str(result["chosen_sequential"]))
    table.add_row("silent fallbacks", str(result["silent"]))
    table.add_row("verdict", "same" if result["passed"] else "DIFFERENT")
    return table
