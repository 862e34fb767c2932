"""The report says what really ran: calls, fallbacks with reasons, the share, strict mode."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from cases import Case, check
from ranks import DEVICE, FUSED, on_device

import flux_megatron
from flux_megatron import errors, settings
from flux_megatron.nn.functions import column_parallel_linear
from flux_megatron.overlap.report import Report, note_call, note_fallback, report, reset_report
from flux_megatron.problem import Pattern, Plan


@pytest.fixture(autouse=True)
def _fresh_report():
    reset_report()
    yield
    reset_report()


def test_nothing_has_run():
    assert report() == Report({}, {}, 0)
    assert report().share == 1.0
    assert report().total == report().overlapped == 0


def test_counts_and_share():
    for pattern, strategy in [("ag_gemm", "fused"), ("ag_gemm", "fused"), ("gemm_rs", "pipelined")]:
        note_call(pattern, strategy)
    note_call(Pattern.GEMM_RS, "sequential")
    now = report()
    assert now.calls == {
        ("ag_gemm", "fused"): 2, ("gemm_rs", "pipelined"): 1, ("gemm_rs", "sequential"): 1
    }  # fmt: skip
    assert (now.total, now.overlapped, now.chosen_sequential, now.share) == (4, 3, 1, 0.75)
    assert str(now).startswith("3 of 4 calls overlapped, 1 sequential by their plan, workspace")
    note_call("ag_gemm", "fused")
    assert now.total == 4, "a report does not change afterwards"


def test_estimates_of_exposed_communication_are_added_up():
    note_call("ag_gemm", "fused")
    assert report().exposed_us is None
    note_call("ag_gemm", "hopper", 3.5)
    note_call("gemm_rs", "hopper", 0.0)
    with pytest.warns(UserWarning, match="no reason"):
        note_fallback("gemm_rs", "no reason", 40.0)
    assert report().exposed_us == 43.5
    reset_report()
    assert report().exposed_us is None


def note_all(fallbacks: list[tuple[str, str]]) -> None:
    for pattern, reason in fallbacks:
        note_fallback(pattern, reason)


def test_a_fallback_is_counted_as_sequential_and_said_once():
    noted = [("ag_gemm", "no reason at all")] * 3 + [("ag_gemm", "another"), ("gemm_rs", "another")]
    with pytest.warns(UserWarning, match="ag_gemm runs without overlap: no reason at all") as said:
        note_all(noted)
    assert len(said) == 3
    now = report()
    assert now.fallbacks == {
        ("ag_gemm", "no reason at all"): 3, ("ag_gemm", "another"): 1, ("gemm_rs", "another"): 1
    }  # fmt: skip
    assert now.calls == {("ag_gemm", "sequential"): 4, ("gemm_rs", "sequential"): 1}
    assert (now.share, now.chosen_sequential) == (0.0, 0)


def test_strict_mode_raises_and_counts_nothing(monkeypatch):
    monkeypatch.setenv("FLUX_MEGATRON_STRICT", "1")
    settings.reload()
    try:
        with pytest.raises(errors.FallbackRefused, match="ag_gemm cannot be overlapped: because"):
            note_fallback("ag_gemm", "because")
    finally:
        monkeypatch.undo()
        settings.reload()
    assert report().total == 0
    assert report().fallbacks == {}


def test_the_text():
    note_call("ag_gemm", "fused")
    with pytest.warns(UserWarning, match="odd"):
        note_fallback("gemm_rs", "odd")
    lines = str(report()).splitlines()
    assert lines[0] == "1 of 2 calls overlapped, workspace 0.0 MiB"
    assert lines[1:] == [
        "  ag_gemm fused: 1", "  gemm_rs sequential: 1", "  gemm_rs fell back 1 times: odd"
    ]  # fmt: skip


def test_a_reset_starts_anew():
    for _ in range(2):
        with pytest.warns(UserWarning, match="again"):
            note_fallback("ag_gemm", "again")
        reset_report()
    assert report() == Report({}, {}, 0)


def real_calls(rank: int) -> tuple[Report, list[str]]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for seed in range(2):
            check(Case("ag_gemm", 5, 4, 3, seed=seed))
            check(Case("gemm_rs", 5, 4, 3, seed=seed, plan=Plan("pipelined")))
            check(Case("gemm_rs", 5, 4, 3, seed=seed, plan=Plan("sequential")))
            check(Case("ag_gemm", 5, 4, 3, seed=seed, dtype=torch.float64))
        with pytest.raises(ValueError, match="equal K"):
            check_refused()
    return flux_megatron.report(), [
        str(w.message) for w in said if "flux_megatron" in str(w.message)
    ]


def check_refused() -> None:
    x, w = torch.ones(2, 3, device=DEVICE), torch.ones(2, 4, device=DEVICE)
    column_parallel_linear(x, w, None, group=dist.group.WORLD)


def test_real_calls():
    reason = "dtype float64 is none of float32, bfloat16, float16"
    for now, said in on_device(real_calls, 2, environment=FUSED):
        assert now.calls == {
            ("ag_gemm", "fused"): 2, ("gemm_rs", "pipelined"): 2,
            ("gemm_rs", "sequential"): 2, ("ag_gemm", "sequential"): 2,
        }  # fmt: skip
        # a plan that asks for sequential is no fallback
        assert now.fallbacks == {("ag_gemm", reason): 2}
        assert said == [f"flux_megatron: ag_gemm runs without overlap: {reason}"]
        assert (now.share, now.chosen_sequential) == (0.5, 2)
        assert now.workspace_bytes > 0
