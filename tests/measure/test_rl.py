"""The runs of frameworks' Ray workers, played: what differs or overlaps nothing fails."""

from __future__ import annotations

import json

import pytest
import torch
import typer

from flux_megatron.lab.measure import bridge, rl

STOCK = {
    "losses": [4.0, 3.0], "norms": [1.0, 1.0], "log_probs": [torch.tensor([-2.0, -1.0])],
    "sent": [{"up": torch.ones(2), "down": torch.zeros(1)}], "seconds": 1.0, "calls": 0,
    "overlapped": 0, "fallbacks": {},
}  # fmt: skip
OURS = {**STOCK, "calls": 8, "overlapped": 8}
PLAYED = {
    "the same": (OURS, 0),
    "another loss": ({**OURS, "losses": [4.0, 3.1]}, 1),
    "another log-probability": ({**OURS, "log_probs": [torch.tensor([-2.0, -1.1])]}, 1),
    "another weight": ({**OURS, "sent": [{"up": torch.ones(2), "down": torch.ones(1)}]}, 1),
    "another name": ({**OURS, "sent": [{"up": torch.ones(2), "left": torch.zeros(1)}]}, 1),
    "no number": ({**OURS, "losses": [4.0, float("nan")]}, 1),
    "no losses": ({**OURS, "losses": []}, 1),
    "nothing overlapped": (STOCK, 1),
    "failed": (None, 1),
}


@pytest.mark.parametrize("case", PLAYED)
def test_an_arm_is_good_if_it_is_as_stock_and_overlaps(case, tmp_path, monkeypatch):
    ours, status = PLAYED[case]
    played = {"stock": STOCK, "ours": ours, "stock again": STOCK}
    monkeypatch.setattr(bridge, "make_model", lambda *_: None)
    monkeypatch.setattr(rl, "make_tokenizer", lambda *_: None)
    monkeypatch.setattr(rl, "run_arm", lambda _, arm, *__: played[arm])
    with pytest.raises(typer.Exit) as ended:
        rl.main(tmp_path / "rows", framework="verl", device="cpu")
    assert ended.value.exit_code == status
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row["arm"] for row in rows] == [arm for arm, seen in played.items() if seen]
    assert [row["good"] for row in rows].count(False) == (status and case != "failed")
