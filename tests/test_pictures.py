"""The pictures of docs/pictures are those that the scripts draw from the committed rows."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "scripts"))
PICTURES = [(m, draw.__name__)
            for m, every in (("draw_pictures", "PICTURES"), ("draw_charts", "CHARTS"))
            for draw in getattr(importlib.import_module(m), every)]  # fmt: skip


@pytest.mark.parametrize(("module", "name"), PICTURES)
def test_committed_pictures_are_the_scripts(module, name, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.import_module("draw_pictures"), "OUT", tmp_path)
    getattr(importlib.import_module(module), name)()
    drawn = (tmp_path / f"{name}.svg").read_text(encoding="utf-8")
    assert drawn == (ROOT / f"docs/pictures/{name}.svg").read_text(encoding="utf-8")


def test_no_picture_is_left_over():
    assert {file.stem for file in (ROOT / "docs/pictures").iterdir()} == {n for _, n in PICTURES}
