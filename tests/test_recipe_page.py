"""docs/recipes.md is that of the table and of what this version refuses."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

import recipe_page

from flux_megatron.integration import parser_signature


def of(recipe: str) -> list[str]:
    return next(recipe_page.command(row) for row in recipe_page.ROWS if row["recipe"] == recipe)


def test_the_page_is_that_of_the_table():
    assert recipe_page.PAGE.read_text(encoding="utf-8") == recipe_page.page(), (
        "docs/recipes.md is old: python scripts/recipe_page.py"
    )


@pytest.mark.parametrize("row", recipe_page.ROWS, ids=lambda row: row["recipe"])
def test_a_row_is_a_launch_of_megatron_s(row):
    assert not parser_signature.check(recipe_page.command(row), recipe_page.RELEASE)
    assert int(row["GPUs"]) % (int(row["TP"]) * int(row["PP"]) * int(row["CP"])) == 0
    assert int(row["TP"]) > 1


def test_the_verdict_is_that_of_the_requirements():
    runs = of("llama3_70b_pretrain_64gpu_fp8cs")
    assert recipe_page.verdict(runs) == "runs"
    told = recipe_page.verdict([option for option in runs if option != "--sequence-parallel"])
    assert told.startswith("refused: `--fp8-format`: without --sequence-parallel")
    assert recipe_page.verdict([*runs, "--sft"]).startswith("if allowed: `--sft`: ")
