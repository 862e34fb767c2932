"""docs/support.md says of each recorded Megatron-LM what the committed rows say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).with_name("integration")))
import releases


def test_the_page_has_the_table():
    page = releases.PAGE.read_text()
    shown = page.split(releases.START)[1].split(releases.END)[0]
    assert shown == releases.table(), "run: python tests/integration/releases.py page"


def test_each_release_has_a_row():
    lines = releases.table().splitlines()[2:]
    assert [line.split("`")[1] for line in lines] == [s.folder.name for s in releases.supported()]


@pytest.mark.parametrize(
    ("rows", "cell"),
    [([], ""), ([(3, 0)], "3 pass"), ([(3, 0), (2, 1)], "2 pass, 1 fail")],
)
def test_the_latest_row_counts(tmp_path, monkeypatch, rows, cell):
    lines = [{"release": "core_v0.19.2", "passed": p, "failed": f, "error": 0} for p, f in rows]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(releases, "ROWS", file)
    (line,) = [x for x in releases.table().splitlines() if "`core_v0.19.2`" in x]
    assert line.split(" | ")[2] == cell


def test_what_pytest_counted():
    line = "....\n1 failed, 402 passed, 4 skipped, 8 deselected in 3.3s (0:06:03)\n"
    assert releases.counts(line) == {"passed": 402, "failed": 1, "skipped": 4, "error": 0}
