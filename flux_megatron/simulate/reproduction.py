"""The tables of docs/reproduction.md: the paper's figures, our predictions, our measured rows.

    python -m flux_megatron.simulate.reproduction docs/reproduction.md docs/results/h200x4

renews them. Predicted are the paper's own clusters, which nobody here has; measured is what one
node of 4 x H200 can run of the same models.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flux_megatron.launch import experiment as experiments
from flux_megatron.perf import layer
from flux_megatron.perf.calibration import renew
from flux_megatron.simulate.predictions import Network, Predictions, predict

OPERATORS = {("ag_gemm", "fc1"): "AG+GEMM", ("gemm_rs", "fc2"): "GEMM+RS"}
CANDIDATES = {"auto": "ours", "te_ring": "TransformerEngine", "async_tp": "torch async-TP"}
CONNECTIONS = ("unset", "1")  # of CUDA_DEVICE_MAX_CONNECTIONS
MODELS = ("gpt3-175b", "llama2-70b")
MS = (2048, 4096, 8192)


def training() -> list[Predictions]:
    """Of the paper's six runs, with every other value of what they assume."""
    names = [name for name in experiments.names() if name.startswith("paper/")]
    return [predict(name, {}, (), Network(), [], alternatives=True) for name in names]


def training_table(runs: Iterable[Predictions]) -> str:
    head = ["run", "over Megatron, paper", "predicted", "over all assumptions"]
    head += ["if forward passes alone overlapped", "over TE, paper", "predicted"]
    head += ["exposed TP share of a Megatron step"]
    rows = []
    for run in runs:
        paper, low_high = run.experiment.paper, run.range("flux")
        stock = run.steps["megatron"]
        rows.append(
            [
                run.experiment.name.removeprefix("paper/"),
                paper["speedup_over_megatron"],
                f"{run.speedups('flux'):.2f}",
                "{:.2f} to {:.2f}".format(*low_high),
                f"{forward_alone(run):.2f}",
                paper["speedup_over_te"],
                f"{run.steps['te'].step_us / run.steps['flux'].step_us:.2f}",
                f"{stock.exposed['tp'] / stock.step_us:.0%}",
            ]
        )
    return _markdown(head, rows)


def forward_alone(run: Predictions) -> float:
    """A layer's speedup over Megatron with our forward and Megatron's backward passes."""
    stock, ours = (layer.pieces(run.workloads[arm]) for arm in ("megatron", "flux"))
    backward = sum(piece.backward_us for piece in stock)
    before, after = (backward + sum(p.forward_us for p in found) for found in (stock, ours))
    return before / after


def sensitivity_table(runs: Sequence[Predictions]) -> str:
    """Ours over Megatron, with one assumption changed at a time."""
    columns = [run.experiment.name.removeprefix("paper/") for run in runs]
    found: dict[str, dict[str, str]] = {"as assumed": {}}
    for column, run in zip(columns, runs, strict=True):
        found["as assumed"][column] = f"{run.speedups('flux'):.3f}"
        for one in run.alternatives:
            cell = f"{run.speedups('flux', one.steps):.3f}" if one.steps else "does not fit"
            found.setdefault(f"{one.key} = {one.value}", {})[column] = cell
    rows = [[key, *(cells.get(column, "") for column in columns)] for key, cells in found.items()]
    return _markdown(["assumption", *columns], rows)


def operator_table(rows: Sequence[dict[str, Any]]) -> str:
    """The paper's two operations on 4 x H200: E of ours and of others,
    CUDA_DEVICE_MAX_CONNECTIONS=1 as in training.
    """
    cells = {
        (row["pattern"], row["M"], row["candidate"]): row["efficiency"]
        for row in rows
        if row["suite"] == "gpt3-175b"
        and (row["pattern"], row["op"]) in OPERATORS
        and row["layout"] == "nt"
        and row["provenance"]["max_connections"] == "1"
    }
    sizes = sorted({M for _, M, _ in cells})
    lines = []
    for (pattern, _), name in OPERATORS.items():
        for M in sizes:
            values = [cells.get((pattern, M, candidate)) for candidate in CANDIDATES]
            shown = [f"{value:.0%}" if value is not None else "no row" for value in values]
            lines.append([name, f"{M}", *shown])
    return _markdown(["operation", "m", *(f"E of {name}" for name in CANDIDATES.values())], lines)


def layer_table(predictions: Iterable[dict[str, Any]]) -> str:
    """A layer's linear operations, forward and backward, on 4 x H200: measured, and predicted with
    the rows of that model and M left out.
    """
    found = {
        (one["model"], one["M"], one["connections"], one["strategy"]): one for one in predictions
    }
    rows = []
    for model in MODELS:
        for M in MS:
            for connections in CONNECTIONS:
                stock, te, ours = (
                    found[model, M, connections, arm] for arm in ("megatron", "te", "auto")
                )
                measured, predicted = (
                    [stock[kind] / ours[kind], te[kind] / ours[kind]]
                    for kind in ("measured_us", "predicted_us")
                )
                times = [f"{one['measured_us']:.0f}" for one in (stock, te, ours)]
                ratios = [f"{m:.3f} / {p:.3f}" for m, p in zip(measured, predicted, strict=True)]
                rows.append([model, f"{M}", connections, *times, *ratios])
    head = ["model", "M", "connections", "Megatron us", "TE us", "ours us"]
    return _markdown([*head, "over Megatron, measured / predicted", "over TE, likewise"], rows)


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def load(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def measured_tables(folder: Path) -> dict[str, str]:
    """Those made of committed rows."""
    return {
        "operators": operator_table(load(folder / "operators_connections-1.jsonl")),
        "layers": layer_table(load(folder / "layer_predictions.jsonl")),
    }


def main(page: Path, results: Path) -> None:
    runs = training()
    tables = {"training": training_table(runs), "sensitivity": sensitivity_table(runs)}
    text = page.read_text()
    for name, table in (tables | measured_tables(results)).items():
        text = renew(text, name, table)
    page.write_text(text)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
