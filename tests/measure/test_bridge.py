"""The runs of Megatron-Bridge, played: what differs or overlaps nothing fails."""

from __future__ import annotations

import json

import pytest
import typer
from started import executable

from flux_megatron.lab.measure import bridge

STOCK = {"losses": [4.0, 3.0], "norms": [1.0, 1.0], "ms": [9.0, 1.0], "calls": 0, "overlapped": 0}
OURS = {**STOCK, "calls": 8, "overlapped": 8}
PLAYED = {
    "the same": (OURS, 0),
    "another loss": ({**OURS, "losses": [4.0, 3.1]}, 1),
    "no number": ({**OURS, "losses": [4.0, float("nan")]}, 1),
    "nothing overlapped": (STOCK, 1),
    "failed": (None, 1),
}


@pytest.mark.parametrize("case", PLAYED)
def test_an_arm_is_good_if_it_is_as_stock_and_overlaps(case, tmp_path, monkeypatch):
    ours, status = PLAYED[case]
    played = {"stock": STOCK, "variable": OURS, "replace": ours, "stock again": STOCK}
    monkeypatch.setattr(bridge, "make_model", lambda *_: None)
    monkeypatch.setattr(bridge, "run", lambda _, arm, *__: played[arm])
    with pytest.raises(typer.Exit) as ended:
        bridge.main(tmp_path / "rows", device="cpu", cases="pretrain", steps=2)
    assert ended.value.exit_code == status
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row["arm"] for row in rows] == [arm for arm, seen in played.items() if seen]
    assert [row["good"] for row in rows].count(False) == (status and case != "failed")


@pytest.mark.parametrize("does", ["exit 0", "exit 3", "sleep 60"])
def test_an_arm_that_leaves_nothing_has_failed(does, tmp_path, monkeypatch):
    begins = "exec " * ("sleep" in does)
    python = executable(tmp_path / "python", f"#!/bin/sh\n{begins}{does}")
    monkeypatch.setattr(bridge.sys, "executable", str(python))
    (tmp_path / "seen.json").write_text(json.dumps(STOCK))  # of the arm before
    about = {"device": "cpu", "ranks": 2}
    assert bridge.run("pretrain", "stock", tmp_path, about, 1) is None
