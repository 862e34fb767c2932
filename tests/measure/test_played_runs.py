"""The runs of Megatron-Bridge and of frameworks' Ray workers, played: what differs or overlaps
nothing fails.
"""

from __future__ import annotations

import json

import pytest
import torch
import typer
from started import executable

from flux_megatron.lab.measure import bridge, rl

STOCK = {"losses": [4.0, 3.0], "norms": [1.0, 1.0], "ms": [9.0, 1.0], "calls": 0, "overlapped": 0}
OF_WORKERS = STOCK | {
    "log_probs": [torch.tensor([-2.0, -1.0])], "seconds": 1.0, "fallbacks": {},
    "sent": [{"up": torch.ones(2), "down": torch.zeros(1)}],
}  # fmt: skip
OURS = {"calls": 8, "overlapped": 8}
PLAYED = {  # what is seen of ours, beside what is seen of stock; None: it failed
    "the same": OURS,
    "another loss": OURS | {"losses": [4.0, 3.1]},
    "no number": OURS | {"losses": [4.0, float("nan")]},
    "nothing overlapped": {},
    "failed": None,
}
BY_WORKERS = PLAYED | {
    "another log-probability": OURS | {"log_probs": [torch.tensor([-2.0, -1.1])]},
    "another weight": OURS | {"sent": [{"up": torch.ones(2), "down": torch.ones(1)}]},
    "another name": OURS | {"sent": [{"up": torch.ones(2), "left": torch.zeros(1)}]},
    "no losses": OURS | {"losses": []},
}


@pytest.mark.parametrize(
    ("runs", "case"), [*((bridge, case) for case in PLAYED), *((rl, case) for case in BY_WORKERS)]
)
def test_an_arm_is_good_if_it_is_as_stock_and_overlaps(runs, case, tmp_path, monkeypatch):
    stock = STOCK if runs is bridge else OF_WORKERS
    ours = None if case == "failed" else stock | BY_WORKERS[case]
    monkeypatch.setattr(bridge, "make_model", lambda *_: None)
    monkeypatch.setattr(rl, "make_tokenizer", lambda *_: None)
    if runs is bridge:
        played = {"stock": stock, "variable": stock | OURS, "replace": ours, "stock again": stock}
        monkeypatch.setattr(bridge, "run", lambda _, arm, *__: played[arm])
        options = {"cases": "pretrain", "steps": 2}
    else:
        played = {"stock": stock, "ours": ours, "stock again": stock}
        monkeypatch.setattr(rl, "run_arm", lambda _, arm, *__: played[arm])
        options = {"framework": "verl"}
    with pytest.raises(typer.Exit) as ended:
        runs.main(tmp_path / "rows", device="cpu", **options)
    assert ended.value.exit_code == (case != "the same")
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row["arm"] for row in rows] == [arm for arm, seen in played.items() if seen]
    bad = [row["arm"] for row in rows if not row["good"]]
    assert bad == ([] if case in ("the same", "failed") else [[*played][-2]])


@pytest.mark.parametrize("does", ["exit 0", "exit 3", "sleep 60"])
def test_an_arm_that_leaves_nothing_has_failed(does, tmp_path, monkeypatch):
    begins = "exec " * ("sleep" in does)
    python = executable(tmp_path / "python", f"#!/bin/sh\n{begins}{does}")
    monkeypatch.setattr(bridge.sys, "executable", str(python))
    (tmp_path / "seen.json").write_text(json.dumps(STOCK))  # of the arm before
    about = {"device": "cpu", "ranks": 2}
    assert bridge.run("pretrain", "stock", tmp_path, about, 1) is None
