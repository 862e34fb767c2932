"""The tables of docs/speed.md: measured rows, and what the simulator says of the same steps.

    python -m flux_megatron.simulate.speed docs/speed.md docs/results

renews them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

from flux_megatron.launch.experiment import names
from flux_megatron.perf.calibration import renew
from flux_megatron.simulate.predictions import Network, predict
from flux_megatron.simulate.reproduction import MODELS, MS, load

Row = dict[str, Any]
ARMS = {"stock": "megatron", "tp_comm_overlap": "te", "flux": "flux"}  # of a row, of a prediction
GRAPHS = "_graphs"
LOSS_RANGES = ((64, 512), (1024, 1024), (2048, 8192))  # of M


def layers(predictions: Sequence[Row]) -> str:
    """Linear operations of a layer on 4 x H200, with CUDA_DEVICE_MAX_CONNECTIONS=1."""
    us = {
        (row["model"], row["M"], row["strategy"]): row["measured_us"]
        for row in predictions
        if row["connections"] == "1"
    }
    lines = []
    for model in MODELS:
        for M in MS:
            stock, te, ours = (us[model, M, arm] for arm in ("megatron", "te", "auto"))
            times = [f"{time:.0f}" for time in (stock, te, ours)]
            lines.append([model, str(M), *times, f"{stock / ours:.3f}", f"{te / ours:.3f}"])
    head = ["model", "M", "Megatron us", "TE us", "ours us"]
    return _table([*head, "over Megatron", "over TE"], lines)


def iterations(rows: Sequence[Row]) -> str:
    """Whole iterations with TP 2, newest commit first: medians of each arm, and predictions."""
    found: dict[tuple[str, int, int, str, bool], dict[str, list[Row]]] = {}
    for row in rows:
        graphs = row["arm"].endswith(GRAPHS)
        key = (row["model"], row["M"], _micro_batches(row), row["commit"], graphs)
        found.setdefault(key, {}).setdefault(row["arm"].removesuffix(GRAPHS), []).append(row)
    lines = []
    for (model, M, micro_batches, commit, graphs), arms in sorted(found.items(), key=_order(rows)):
        medians = [", ".join(_ms(row["median_ms"]) for row in arms.get(arm, [])) for arm in ARMS]
        ours = arms["flux"][0]
        speedup = ours["speedup"].rsplit(", ", 1)[0] if "speedup" in ours else "-"
        predicted = "-" if graphs else ", ".join(predictions(ours))
        cells = [model + ", CUDA graphs" * graphs, f"{M} x {micro_batches}", commit]
        lines.append([*cells, *(median or "-" for median in medians), speedup, predicted])
    head = ["model", "M x micro-batches", "commit", "stock ms", "`--tp-comm-overlap` ms", "ours ms"]
    return _table([*head, "over stock", "predicted ms: stock, TE, ours"], lines)


def predictions(row: Row) -> list[str]:
    """Milliseconds of the arms for the step that `row` measured, of its number of layers."""
    batch = row["M"] // row["seq_length"]
    changed = {
        "parallel.tp": row["tp"],
        "cluster.gpus_per_node": row["tp"],
        "training.micro_batch": batch,
        "training.global_batch": batch * _micro_batches(row),
        "model.seq_length": row["seq_length"],
        "model.layers": row["layers"],
    }
    family = row["model"].removesuffix(f"-{row['layers']}-layers")
    (name,) = (name for name in names() if name.startswith(f"node/{family}-"))
    found = predict(name, changed, (), Network(), [], alternatives=False)
    steps = {str(arm): step for arm, step in found.steps.items()}
    return [_ms(round(steps[arm].step_us * 1e-3, 3)) for arm in ARMS.values()]


def losses(results: Path) -> str:
    """Forward and backward calls on 4 x H200 that took longer than NCCL and a library GEMM."""
    lines = []
    for connections in ("unset", "1"):
        cases: dict[tuple[Any, ...], dict[str, Row]] = {}
        for row in load(results / f"h200x4/operators_connections-{connections}.jsonl"):
            case = (row["suite"], row["pattern"], row["op"], row["M"])
            cases.setdefault(case, {})[row["candidate"]] = row
        for least, most in LOSS_RANGES:
            ratios = [
                of["auto"]["median_us"] / of["serial"]["median_us"]
                for (*_, M), of in cases.items()
                if least <= M <= most and all(_is_timed(of.get(n)) for n in ("auto", "serial"))
            ]
            slower = [sum(ratio > bound for ratio in ratios) for bound in (1.0, 1.02)]
            Ms = f"{least}" if least == most else f"{least} to {most}"
            cells = [connections, Ms, str(len(ratios)), *map(str, slower)]
            lines.append([*cells, f"{max(ratios):.2f}"])
    head = ["connections", "M", "calls", "slower", "by more than 2 %", "worst, ours / NCCL"]
    return _table(head, lines)


def _is_timed(row: Row | None) -> bool:
    return row is not None and row["median_us"] is not None


def _order(rows: Sequence[Row]) -> Any:
    """Eager before graphs; by model, M and micro-batches; the commit of the last rows first."""
    last = {row["commit"]: number for number, row in enumerate(rows)}
    return lambda item: (item[0][4], *item[0][:3], -last[item[0][3]])


def _micro_batches(row: Row) -> int:
    return row.get("micro_batches") or 1  # rows before the option have none


def _ms(value: float) -> str:
    return str(Decimal(str(value)).quantize(Decimal("0.1"), ROUND_HALF_UP))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def tables(results: Path) -> dict[str, str]:
    return {
        "layers": layers(load(results / "h200x4/layer_predictions.jsonl")),
        "iterations": iterations(load(results / "h200x2/iterations.jsonl")),
        "losses": losses(results),
    }


def main(page: Path, results: Path) -> None:
    text = page.read_text()
    for name, table in tables(results).items():
        text = renew(text, name, table)
    page.write_text(text)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
