"""The tables of docs/reproduction.md are those of the committed rows and of the model as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pydantic", reason="needs the extra `launch`")

from flux_megatron.simulate import reproduction
from flux_megatron.simulate.predictions import Network, predict

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reproduction.md").read_text()


@pytest.mark.parametrize("name", ["operators", "layers"])
def test_measured_tables_are_the_committed_rows(name):
    table = reproduction.measured_tables(ROOT / "docs/results/h200x4")[name]
    assert f"<!-- {name} -->\n{table}\n<!-- end of {name} -->" in PAGE
    assert "no row" not in table


RUN = "paper/llama2-70b_a100-nvlink"


def test_predictions_are_the_models_of_today():
    """Of one run; the page's command makes all."""
    run = predict(RUN, {}, (), Network(), [], alternatives=True)
    (row,) = reproduction.training_table([run]).splitlines()[2:]
    assert row in PAGE
    on_page = cells(PAGE.split("<!-- sensitivity -->\n")[1].split("\n<!--")[0])
    assert cells(reproduction.sensitivity_table([run])).items() <= on_page.items()


def cells(table: str) -> dict[str, str]:
    """The column of RUN by its assumption."""
    head, _, *rows = [line.split("|")[1:-1] for line in table.splitlines()]
    column = [name.strip() for name in head].index(RUN.removeprefix("paper/"))
    return {row[0].strip(): row[column].strip() for row in rows}


def test_a_run_that_changed_is_seen():
    run = predict(RUN, {"training.micro_batch": 4}, (), Network(), [], alternatives=False)
    (row,) = reproduction.training_table([run]).splitlines()[2:]
    assert row not in PAGE
