"""A file of docs/ that code, scripts or tests name is there, and so is a decision by its number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMED = re.compile(r"docs/[\w/.-]*\w\.(?:md|svg|jsonl?|png)\b")
DECISION = re.compile(r"[Dd]ecisions? (\d+)\b")
SOURCES = [file for folder in ("flux_megatron", "scripts", "tests")
           for pattern in ("*.py", "*.sh", "*.c", "*.yaml", "*.tsv")
           for file in (ROOT / folder).rglob(pattern)]  # fmt: skip


def missing(text: str) -> list[str]:
    records = {file.name[:4] for file in (ROOT / "docs/decisions").glob("0*.md")}
    lost = [name for name in NAMED.findall(text) if not (ROOT / name).exists()]
    return lost + [f"decision {n}" for n in DECISION.findall(text) if n not in records]


@pytest.mark.parametrize("folder", ["flux_megatron", "scripts", "tests"])
def test_every_named_file_is_there(folder):
    found = {str(file.relative_to(ROOT)): missing(file.read_text())
             for file in SOURCES if file.is_relative_to(ROOT / folder)
             and file != Path(__file__)}  # fmt: skip
    assert {file: names for file, names in found.items() if names} == {}
