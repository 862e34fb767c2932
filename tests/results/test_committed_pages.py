"""The pages and pictures of measurements are those that the rows of docs/results make."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flux_megatron.lab.results import charts, pages
from flux_megatron.lab.results.committed import Race, races
from flux_megatron.lab.results.committed_tables import TABLES

ROOT = Path(__file__).parents[2]
GAIN = re.compile(r"\d\.\d{3} \(\d\.\d{3} to \d\.\d{3}\)")
NUMBER = re.compile(r"(?<![\w.,])\d+\.\d{2,3}(?![\w.])")  # a speed or an E; no version of a program
TEXT = re.compile(r"<text [^>]*>([^<]*)</text>")


def numbers(file: str) -> set[str]:
    text = (ROOT / file).read_text(encoding="utf-8").replace("95 %: ", "")
    return {*GAIN.findall(text), *NUMBER.findall(text)}


def test_the_tables_are_made_from_the_rows():
    made, committed = pages.page(ROOT), (ROOT / pages.PAGE).read_text(encoding="utf-8")
    assert made.splitlines() == committed.splitlines(), f"run python -m {pages.__name__}"
    tables = re.findall(r"^## (.*)\n(?:[^|#\n].*\n|\n)*((?:\|.*\n)+)", committed, re.M)
    assert [title for title, _ in tables] == [*TABLES]
    for title, lines in tables:
        widths = {line.count("|") for line in lines.splitlines()}
        assert len(widths) == 1, title
        assert len(lines.splitlines()) > 3, title


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md", "docs/frameworks.md"])
def test_no_number_of_a_page_is_without_a_row(page):
    found = numbers(page)
    assert len(found) >= 5
    assert found <= numbers(str(pages.PAGE))


@pytest.mark.parametrize("name", charts.CHARTS)
def test_a_picture_shows_the_rows(name, tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra `launch`")
    (tmp_path / "docs/pictures").mkdir(parents=True)
    (tmp_path / "docs/results").symlink_to(ROOT / "docs/results")
    charts.write(tmp_path)
    file = f"docs/pictures/{name}.svg"
    made, committed = (TEXT.findall((root / file).read_text()) for root in (tmp_path, ROOT))
    assert made == committed, f"run python -m {pages.__name__}"
    assert len(made) > 10


def row(arm: str, ms: float, commit: str) -> str:
    return f'{{"arm": "{arm}", "ms": {ms}, "commit": "{commit}"}}'


def test_the_newest_race_counts_and_arms_of_two_races_are_not_compared(tmp_path):
    (tmp_path / "h200x2").mkdir()
    lines = [row("stock", 4, "a"), row("ours", 2, "a"), row("stock", 6, "b"), row("ours", 4, "b"),
             row("stock", 9, "b"), row("ours", 3, "c")]  # fmt: skip
    (tmp_path / "h200x2" / "steps.jsonl").write_text("\n".join(lines) + "\n")

    def of(needed: tuple[str, ...]) -> list[Race]:
        return races(tmp_path, ("steps",), lambda _, row: (("case",), row["arm"]), needed)

    (race,) = of(("stock", "ours"))
    assert (race.gpus, race.commit) == ("2 x H200", "b")
    assert race.over("stock", "ours", "ms") == "1.500"
    assert [one.commit for one in of(("ours",))] == ["c"]
