"""The norms' measurement in small, and that it measures no wrong norm."""

from __future__ import annotations

import norm_speed
import pytest
import torch
from ranks import DEVICE, on_device

from flux_megatron.nn import norm


def _rows(rank) -> list[dict]:
    norm.INTERPRET = True
    return [*norm_speed.measure(torch.device(DEVICE), [(16, 64)], torch.float32, rounds=2)]


def test_rows_of_all_candidates():
    (rows,) = on_device(_rows, 1)
    seen = {(row["kind"], row["direction"], row["candidate"]) for row in rows}
    assert len(seen) == len(rows) >= 8
    assert all(row["median_us"] > 0 and len(row["times_us"]) == 2 for row in rows)


def test_a_wrong_norm_is_not_measured(monkeypatch):
    monkeypatch.setattr(norm, "rms_norm", lambda x, weight, eps: x * weight)
    with pytest.raises(AssertionError, match=r"rms_norm.* ours: errors"):
        next(norm_speed.measure(torch.device(DEVICE), [(16, 64)], torch.float32))
