"""The features of docs/support.md: `python tests/integration/feature_table.py` renews them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from training_cases import FEATURES, REFUSED  # noqa: E402
from training_run import Feature  # noqa: E402

PAGE = TESTS.parent / "docs" / "support.md"
START, END = "<!-- features -->\n", "\n<!-- end of features -->"


def table() -> str:
    return "\n".join(
        ("| feature | TP x PP x DP | dtype | calls |", "| --- | --- | --- | --- |", *_rows())
    )


def _rows() -> Iterator[str]:
    for name, feature in FEATURES.items():
        yield _row(name, feature, feature.runs)
    for name, (feature, error, message) in REFUSED.items():
        yield _row(name, feature, f"refused, {error.__name__}: {message}")


def _row(name: str, feature: Feature, calls: str) -> str:
    ranks = f"{feature.tp} x {feature.pp} x {feature.dp}"
    return f"| {name} | {ranks} | {str(feature.dtype).removeprefix('torch.')} | {calls} |"


def main() -> None:
    before, rest = PAGE.read_text().split(START)
    PAGE.write_text(before + START + table() + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
