"""The page of reliability: every row is shown, what is bad is bold, a lacking field is named."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from flux_megatron.cli import app

FAULT = {
    "table": "faults", "fault": "SIGKILL of one rank", "device": "cpu", "ranks": 2, "runs": 20,
    "ended": 20, "named": 20, "longest_s": 5.25, "bound_s": 5.0, "orphans": 0, "leftovers": 0,
    "errors": {"RankLost": 13, "SignalTimeout": 7}, "git": "abc1234", "date": "2026-11-22",
}  # fmt: skip
HOLD = {
    "table": "hold", "pattern": "gemm_rs", "M": 8192, "N": 12288, "K": 12288, "tp": 2,
    "strategy": "hopper", "held_sms": 1, "held_on": "all ranks", "arm": "new", "ms": 3.512,
}  # fmt: skip
RACE = {"table": "race", "mode": "graphs", "calls": 10000, "hangs": 0}


def page(tmp_path, *rows, expected=0):
    file, out = tmp_path / "rows.jsonl", tmp_path / "reliability.md"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = CliRunner().invoke(app, ["reliability", str(file), "--out", str(out)])
    assert done.exit_code == expected, done.output
    return out.read_text() if expected == 0 else done.output


def test_every_table_is_shown(tmp_path):
    old = HOLD | {"arm": "old", "ms": 57.7}
    text = page(tmp_path, FAULT, HOLD, old, RACE, {"what": "a row of another page"})
    assert "| SIGKILL of one rank | 2 x cpu | 20 | 20 | 20 | 5.2 | 5 | 0 | 0 | " in text
    assert "RankLost 13, SignalTimeout 7" in text
    assert "| new, all ranks | old, all ranks |" in text
    assert "| gemm_rs | 2 | 8192 x 12288 x 12288 | hopper | 1 | 3.51 | 57.70 |" in text
    assert "| graphs | 10000 | 0 |" in text


def test_tables_without_rows_are_left_out_and_the_latest_row_counts(tmp_path):
    text = page(tmp_path, FAULT | {"named": 3}, FAULT)
    assert "Beside other kernels" not in text
    assert "Racing" not in text
    assert text.count("SIGKILL of one rank") == 1
    assert "**SIGKILL" not in text


@pytest.mark.parametrize("bad", [{"ended": 19}, {"named": 19}, {"orphans": 1}, {"leftovers": 2}])
def test_what_is_bad_is_bold(tmp_path, bad):
    assert "| **SIGKILL of one rank** |" in page(tmp_path, FAULT | bad)
    assert "| **graphs** |" in page(tmp_path, RACE | {"hangs": 1})


@pytest.mark.parametrize(("row", "field"), [(FAULT, "orphans"), (HOLD, "arm"), (RACE, "calls")])
def test_a_row_that_lacks_a_field_is_named(tmp_path, row, field):
    lacking = {key: value for key, value in row.items() if key != field}
    assert f"rows.jsonl line 2: without {field}" in page(tmp_path, RACE, lacking, expected=2)
