"""The gains that README.md names are rows and those of its picture, and its sentences say which
layers of Megatron they ran with: `--transformer-impl local` is not Megatron's default.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
GAIN = r"(\d\.\d{3})[^()]*\((?:95 %: )?(\d\.\d{3}) to (\d\.\d{3})\)"


def rows() -> dict[tuple[str, ...], str | None]:
    """Of each gain and its interval the layers that it was measured with."""
    found: dict[tuple[str, ...], str | None] = {}
    for file in (ROOT / "docs" / "results").glob("*/iterations.jsonl"):
        for row in map(json.loads, file.read_text().splitlines()):
            for gain in re.findall(GAIN, row.get("speedup", "")):
                found[gain] = row.get("transformer_impl")
    return found


def section() -> str:
    text = (ROOT / "README.md").read_text()
    return text.split("\n## What does it gain?\n")[1].split("\n## ")[0]


def test_the_picture_has_the_gains_of_the_text():
    (file,) = re.findall(r"\((docs/pictures/[\w.]+)\)", section())
    drawn = re.findall(r">(\d\.\d{3})</text>", (ROOT / file).read_text())
    assert sorted(drawn) == sorted(gain for gain, *_ in re.findall(GAIN, section()))


def test_a_gain_stands_beside_the_layers_that_it_was_measured_with():
    measured, named = rows(), set()
    for paragraph in section().split("\n\n"):
        local = "`--transformer-impl local`" in paragraph
        for gain in re.findall(GAIN, paragraph):
            assert measured[gain] == ("local" if local else "transformer_engine"), gain
            named.add(local)
    assert named == {True, False}, "both Megatron's default and the other one"
