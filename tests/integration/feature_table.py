"""The features of docs/support.md: `python tests/integration/feature_table.py` renews them."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from training_cases import FEATURES, REFUSED  # noqa: E402
from training_run import Feature  # noqa: E402

PAGE = TESTS.parent / "docs" / "support.md"
START, END = "<!-- features -->\n", "\n<!-- end of features -->"


def table() -> str:
    """A line for each kind of run, so that a reader finds a feature and not its repetitions."""
    kinds: dict[str, list[str]] = {}
    for name, feature in FEATURES.items():
        kinds.setdefault(f"{_ranks(feature)} | {feature.runs}", []).append(name)
    for name, (feature, error, message) in REFUSED.items():
        kinds[f"{_ranks(feature)} | refused, {error.__name__}: {message}"] = [name]
    lines = [f"| {kind} | {'; '.join(names)} |" for kind, names in kinds.items()]
    return "\n".join(("| TP x PP x DP, dtype | calls | features |", "| --- | --- | --- |", *lines))


def _ranks(feature: Feature) -> str:
    dtype = str(feature.dtype).removeprefix("torch.")
    return f"{feature.tp} x {feature.pp} x {feature.dp}, {dtype}"


def main() -> None:
    before, rest = PAGE.read_text().split(START)
    PAGE.write_text(before + START + table() + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
