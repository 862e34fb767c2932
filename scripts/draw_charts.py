"""The charts of docs/pictures, from rows of docs/results: `python scripts/draw_charts.py`.

A white panel keeps them readable on any page. The sketches beside them are edited by hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS / "results"
NAMES = {"gpt3-175b": "GPT-3", "llama2-70b": "Llama-2"}
INK, FAINT = "#1f2933", "#6b7785"
STOCK, USERBUFFERS, OURS, ASYNC_TP = FAINT, "#f7d9a8", "#bfe3c8", "#bcd4f2"
WIDTH = 780
Row = dict[str, Any]


class Picture:
    """Bars and texts in a panel of `height`."""

    def __init__(self, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" font-family="Helvetica, Arial, sans-serif" '
            f'font-size="13" role="img" aria-label="{escape(title)}">',
            f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8" '
            'fill="#ffffff" stroke="#c9d0d8"/>',
        ]

    def text(self, x: float, y: float, text: str, color: str = INK, anchor: str = "start",
             bold: bool = False) -> None:  # fmt: skip
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" fill="{color}" text-anchor="{anchor}"{weight}>'
            f"{escape(text)}</text>"
        )

    def bar(self, x: float, y: float, width: float, height: int, color: str) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height}" rx="2" '
            f'fill="{color}" stroke="{FAINT}" stroke-width="0.7"/>'
        )

    def line(self, x0: float, y0: float, x1: float, y1: float, color: str = INK) -> None:
        path = f"M{x0:g} {y0:g}L{x1:g} {y1:g}"
        self.parts.append(f'<path d="{path}" stroke="{color}" stroke-width="1.2" fill="none"/>')

    def legend(self, y: float, *entries: tuple[str, str]) -> None:
        x = 118
        for color, text in entries:
            self.bar(x, y, 14, 14, color)
            self.text(x + 20, y + 12, text, FAINT)
            x += 38 + round(6.6 * len(text))

    def save(self, name: str) -> None:
        text = "\n".join([*self.parts, "</svg>"]) + "\n"
        (DOCS / "pictures" / name).write_text(text, encoding="utf-8")


def rows(name: str) -> Iterator[Row]:
    for line in (RESULTS / name).read_text().splitlines():
        yield json.loads(line)


def layers() -> Iterator[tuple[str, dict[str, float]]]:
    """Speed over Megatron of one layer, TP 4, M 8192."""
    found = [r for r in rows("h200x4/layer_predictions.jsonl")
             if r["M"] == 8192 and r["connections"] == "1"]  # fmt: skip
    for model, name in NAMES.items():
        us = {r["strategy"]: r["measured_us"] for r in found if r["model"] == model}
        yield f"{name}, a layer", {arm: us["megatron"] / us[arm] for arm in ("te", "auto")}


def steps() -> Iterator[tuple[str, dict[str, float]]]:
    """Speed over Megatron of iterations, TP 2, M 4096, where all three ran at one commit."""
    found = [r for r in rows("h200x2/iterations.jsonl")
             if r["commit"] == "3b03573" and r["M"] == 4096]  # fmt: skip
    for model, name in NAMES.items():
        ms = {r["arm"]: r["median_ms"] for r in found if r["model"].startswith(model)}
        yield f"{name}, a step", {arm: ms["stock"] / ms[arm] for arm in ("tp_comm_overlap", "flux")}


def gain() -> None:
    """One layer and whole iterations: Megatron, userbuffers, ours."""
    p = Picture(394, "Speed of Megatron, TransformerEngine's userbuffers and flux_megatron")
    p.text(18, 26, "times as fast as stock Megatron", bold=True)
    y = 42.0
    for title, speeds in (*layers(), *steps()):
        p.text(150, y + 34, title, FAINT, "end")
        for color, speed in zip((STOCK, USERBUFFERS, OURS), (1.0, *speeds.values()), strict=True):
            p.bar(162, y, 480 * speed, 17, color)
            p.text(168 + 480 * speed, y + 13, f"{speed:.3f}")
            y += 20
        y += 16
    p.legend(y, (STOCK, "Megatron"), (USERBUFFERS, "userbuffers"), (OURS, "flux_megatron"))
    layer, step = (
        "A layer: linear operations, TP 4, M 8192.",
        "A step: pretrain_gpt.py, TP 2, M 4096.",
    )
    p.text(18, y + 34, f"H200, bf16. {layer} {step}", FAINT)
    p.save("gain.svg")


CASES = (  # folder, model, M, micro-batches, commit, which of its runs: the newest of each case
    ("h200x4", "gpt3-175b-4-layers", 8192, 1, "3836794", 0, "4 x H200, TP 4, GPT-3, M 8192"),
    ("h200x4", "gpt3-175b-4-layers", 2048, 1, "3836794", 0, "4 x H200, TP 4, GPT-3, M 2048"),
    ("h200x4", "gpt3-175b-4-layers", 8192, 1, "97992bd", 0, "4 x H200, TP 2 x DP 2, GPT-3, M 8192"),
    ("h200x2", "gpt3-175b-4-layers", 8192, None, "3b03573", 0, "2 x H200, GPT-3, M 8192"),
    ("h200x2", "gpt3-175b-4-layers", 2048, 8, "8302fd7", 0, "2 x H200, GPT-3, M 2048 x 8"),
    ("h200x2", "gpt3-175b-4-layers", 2048, 1, "8302fd7", 0, "2 x H200, GPT-3, M 2048"),
    ("h200x2", "llama2-70b-8-layers", 8192, None, "3b03573", 0, "2 x H200, Llama-2, M 8192"),
    ("h200x2", "llama2-70b-4-layers", 2048, 8, "4761ec7", 0, "2 x H200, Llama-2, M 2048 x 8"),
    ("h200x2", "llama2-70b-8-layers", 2048, 1, "7800a2e", 0, "2 x H200, Llama-2, M 2048"),
    ("h100x2", "gpt3-175b-2-layers", 2048, 8, "dd57978", 0, "2 x H100, GPT-3, M 2048 x 8"),
    ("h100x2", "gpt3-175b-2-layers", 2048, 8, "dd57978", 1, "the same, second run"),
    ("h100x2", "llama2-70b-2-layers", 2048, 8, "dd57978", 0, "2 x H100, Llama-2, M 2048 x 8"),
    ("h100x2", "llama2-70b-2-layers", 2048, 8, "dd57978", 1, "the same, second run"),
)


def iterations() -> None:
    """Ours over stock, with 95 % intervals."""
    p = Picture(80 + 26 * len(CASES), "Whole iterations over stock, with 95 % intervals")
    p.text(18, 26, "whole iterations: times as fast as stock, and 95 % interval", bold=True)
    left, scale = 300, 1900
    for n, (folder, model, M, batches, commit, run, title) in enumerate(CASES):
        row = [
            r
            for r in rows(f"{folder}/iterations.jsonl")
            if r.get("arm") == "flux"
            and (r["model"], r["M"], r.get("micro_batches"), r["commit"])
            == (model, M, batches, commit)
        ][run]
        low, middle, high = row["speedup_low_middle_high"]
        y = 42 + 26 * n
        p.text(left - 18, y + 17, title, FAINT, "end")
        p.bar(left, y + 4, (middle - 1) * scale, 17, OURS)
        p.line(left + (low - 1) * scale, y + 12, left + (high - 1) * scale, y + 12)
        p.text(left + (high - 1) * scale + 8, y + 17, f"{middle:.3f}")
    end = 48 + 26 * len(CASES)
    p.line(left, 40, left, end, FAINT)
    p.text(left, end + 16, "1.0: stock", FAINT, "middle")
    p.save("iterations.svg")


def efficiency() -> None:
    """E by M of GPT-3's fc1 and fc2, TP 4: ours, userbuffers, async-TP."""
    p = Picture(412, "Share of the communication that is hidden, by M")
    p.text(
        18, 26, "share of the communication that is hidden (E), GPT-3, 4 x H200, TP 4", bold=True
    )
    found = [r for r in rows("h200x4/operators_connections-unset.jsonl")
             if r["suite"] == "gpt3-175b"]  # fmt: skip
    y = 42.0
    for pattern, op, name in (("ag_gemm", "fc1", "AG+GEMM"), ("gemm_rs", "fc2", "GEMM+RS")):
        for M in (1024, 2048, 4096, 8192):
            p.text(150, y + 22, f"{name}, M {M}", FAINT, "end")
            arms = (("auto", OURS), ("te_ring", USERBUFFERS), ("async_tp", ASYNC_TP))
            for n, (arm, color) in enumerate(arms):
                (E,) = [r["efficiency"] for r in found
                        if (r["pattern"], r["op"], r["M"], r["candidate"])
                        == (pattern, op, M, arm)]  # fmt: skip
                p.bar(162, y + 12 * n, 480 * E, 10, color)
                if arm == "auto":
                    p.text(648, y + 14, f"{E:.2f}")
            y += 41
    p.legend(
        y + 6, (OURS, "ours"), (USERBUFFERS, "userbuffers, ring"), (ASYNC_TP, "torch async-TP")
    )
    p.save("efficiency.svg")


CHARTS = (gain, iterations, efficiency)


if __name__ == "__main__":
    for draw in CHARTS:
        draw()
