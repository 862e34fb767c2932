"""The clock around a layer's calls, without GPUs."""

from __future__ import annotations

import json
import time

import host_time
import pytest

from flux_megatron.integration import arm


class Base:
    def forward(self, seconds):
        time.sleep(seconds)
        return seconds


class Layer(Base):
    @staticmethod
    def backward(seconds):
        time.sleep(seconds)
        raise ValueError("no gradient")


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(Layer, "forward", Base.forward, raising=False)  # put back at the end
    monkeypatch.setattr(Layer, "backward", vars(Layer)["backward"])
    clock = host_time.Clock()
    clock.around(Layer, "forward", "layer")
    clock.around(Layer, "backward", "backward")
    return clock


def test_calls_keep_results_and_errors(clock):
    assert Layer().forward(0.01) == 0.01
    with pytest.raises(ValueError, match="no gradient"):
        Layer.backward(0.02)
    times = clock.means_us()
    assert times["layer"] >= 1e4
    assert times["backward"] >= 2e4
    assert not hasattr(Base.forward, "__wrapped__"), "another layer's method was changed"


def test_only_timed_iterations_have_rows(clock, tmp_path, monkeypatch):
    monkeypatch.setattr(host_time, "TIMED", [2, 3])
    out = tmp_path / "rows.jsonl"
    seconds = iter([0.5, 0.0, 0.0, 0.5])
    step = host_time.time_iterations(lambda: Layer().forward(next(seconds)), clock, out)
    for stock in (True, True, False, False):
        with arm.use(stock):
            step()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["arm"], row["iteration"]) for row in rows] == [("stock", 2), ("flux", 3)]
    assert all(row["mean_us"]["layer"] < 2e5 for row in rows), "of its own iteration"


def test_every_part_is_there():
    pytest.importorskip("megatron.core")
    assert all(callable(getattr(owner, name)) for owner, name, _ in host_time.parts())
