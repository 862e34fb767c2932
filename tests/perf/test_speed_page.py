"""The tables of docs/speed.md are those of the committed rows and of the simulator as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pydantic", reason="needs the extra `launch`")

from flux_megatron.simulate import speed

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/speed.md").read_text()


@pytest.mark.parametrize("name", ["layers", "iterations", "losses"])
def test_tables_are_the_committed_rows(name):
    table = speed.tables(ROOT / "docs/results")[name]
    assert f"<!-- {name} -->\n{table}\n<!-- end of {name} -->" in PAGE


def test_halves_are_rounded_up_as_people_do():
    assert speed._ms(148.85) == "148.9"
