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
    "table": "hold", "piece": "row backward", "M": 8192, "N": 12288, "K": 12288, "tp": 2,
    "version": "new", "strategy": "hopper", "held_sms": 1, "held_on": "all", "us": 3116.2,
    "to_sequential": 0.85, "finished_while_held": True, "gpu": "H200", "date": "2026-11-22T08:00",
    "commit": "abc1234", "torch": "2.11", "triton": "3.6",
}  # fmt: skip
RACE = {
    "table": "race", "calls": 10000, "hangs": 0, "wrong": 0, "replays": 3072, "all_reduces": 1249,
    "tp": 2, "max_connections": "1", "gpu": "H200",
}  # fmt: skip


BESIDE = {
    "pattern": "gemm_rs", "op": "fc2", "M": 8192, "N_local": 12288, "K_local": 12288,
    "candidate": "hopper", "status": "ok", "median_us": 3793.2, "efficiency": 1.012, "beside": True,
    "provenance": {"world_size": 2, "max_connections": "1"} | {k: HOLD[k] for k in (
        "gpu", "date", "commit", "torch", "triton")},
}  # fmt: skip


def page(tmp_path, *rows, expected=0):
    file, out = tmp_path / "rows.jsonl", tmp_path / "reliability.md"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = CliRunner().invoke(app, ["reliability", str(file), "--out", str(out)])
    assert done.exit_code == expected, done.output
    return out.read_text() if expected == 0 else done.output


def test_every_table_is_shown(tmp_path):
    free = HOLD | {"held_sms": 0, "held_on": "none", "us": 3070.4, "to_sequential": 0.88}
    one = HOLD | {"held_on": "rank0", "us": 3120.0, "to_sequential": 0.91}
    old = HOLD | {"version": "old", "us": 61114.0, "to_sequential": 16.66}
    old |= {"finished_while_held": False}
    text = page(
        tmp_path, FAULT, free, HOLD, one, old, BESIDE, RACE, {"what": "a row of another page"}
    )
    assert "| SIGKILL of one rank | 2 x cpu | 20 | 20 | 20 | 5.2 | 5 | 0 | 0 | " in text
    assert "RankLost 13, SignalTimeout 7" in text
    call = "| row backward | 2 | 8192 x 12288 x 12288 | hopper"
    assert f"{call} | 3070 | 3116 | 0.91 |" in text
    assert f"{call}, before | - | **61114** | 16.66 |" in text
    assert "H200, 2026-11-22 (commit abc1234, torch 2.11, triton 3.6)" in text
    beside = "| gemm_rs fc2 | 2 | 8192 x 12288 x 12288 | 1 | beside"
    assert f"{beside} | - | - | - | 3793 (1.01) | - | - |" in text
    assert "| 2 x H200 | 1 | 10000 | 3072 | 1249 | 0 | 0 |" in text


def test_tables_without_rows_are_left_out_and_the_latest_row_counts(tmp_path):
    text = page(tmp_path, FAULT | {"named": 3}, FAULT)
    assert "while SMs are held" not in text
    assert "racing orders" not in text
    assert text.count("SIGKILL of one rank") == 1
    assert "**SIGKILL" not in text


@pytest.mark.parametrize("bad", [{"ended": 19}, {"named": 19}, {"orphans": 1}, {"leftovers": 2}])
def test_what_is_bad_is_bold(tmp_path, bad):
    assert "| **SIGKILL of one rank** |" in page(tmp_path, FAULT | bad)
    assert "| **1** | 0 |" in page(tmp_path, RACE | {"hangs": 1})


@pytest.mark.parametrize(("row", "field"), [(FAULT, "orphans"), (HOLD, "held_on"), (RACE, "calls")])
def test_a_row_that_lacks_a_field_is_named(tmp_path, row, field):
    lacking = {key: value for key, value in row.items() if key != field}
    assert f"rows.jsonl line 2: without {field}" in page(tmp_path, RACE, lacking, expected=2)
