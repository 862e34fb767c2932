"""The verdict of --compare on made-up curves: it must pass what agrees and fail everything else."""

from __future__ import annotations

import json
import math

import pytest

pytest.importorskip("pydantic", reason="needs the extra `train`")

from flux_megatron.lab.train import compare, config, run_folder

LOSSES = [5.0, 4.0, 3.0]


def rows(losses):
    return [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]


def finished(out, silent=0, chosen=0, **arms):
    """`out` as the runs named by `arms` leave it."""
    for arm, losses in arms.items():
        folder = out / arm.replace("_", "-")
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows(losses))
        )
    counts = {"calls": {"ag_gemm fused": 6}, "fallbacks": {}, "overlapped": 6, "eligible": 6}
    counts |= {"chosen_sequential": chosen, "silent": silent}
    run_folder.write_json(out / "flux" / "summary.json", counts)
    return out


def test_equal_curves_pass(tmp_path):
    out = finished(tmp_path, flux=LOSSES, stock=LOSSES)
    assert compare.conclude(out, ("stock",)) == 0
    assert run_folder.read_json(out / "compare.json")["largest_difference"] == 0
    assert (out / "compare.png").exists()


@pytest.mark.parametrize(
    "losses", [[5.0, 4.00002, 3.0], [5.0, math.nan, 3.0], [5.0, 4.0, math.inf]], ids=str
)
def test_one_step_beyond_the_tolerance_fails(tmp_path, losses):
    assert compare.conclude(finished(tmp_path, flux=losses, stock=LOSSES), ("stock",)) == 1


def test_a_call_that_did_not_overlap_in_silence_fails(tmp_path):
    out = finished(tmp_path, silent=1, flux=LOSSES, stock=LOSSES)
    assert compare.conclude(out, ("stock",)) == 1


def test_a_call_whose_plan_is_sequential_is_distinguished(tmp_path, capsys):
    out = finished(tmp_path, chosen=2, flux=LOSSES, stock=LOSSES)
    assert compare.conclude(out, ("stock",)) == 0
    assert run_folder.read_json(out / "compare.json")["chosen_sequential"] == 2
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "sequential by their plan" in x]
    assert line.split("│")[2].strip() == "2"


def test_different_steps_are_refused(tmp_path):
    with pytest.raises(config.ConfigError, match="different steps: 2 and 3"):
        compare.conclude(finished(tmp_path, flux=LOSSES[:2], stock=LOSSES), ("stock",))


@pytest.mark.parametrize(("shift", "code"), [(0.0, 0), (0.009, 0), (0.03, 1), (math.nan, 1)])
def test_low_precision_is_measured_against_the_spread_of_stock(tmp_path, shift, code):
    out = finished(
        tmp_path,
        flux=[loss + shift for loss in LOSSES],
        stock=LOSSES,
        stock_rank_order=[loss - 0.005 for loss in LOSSES],
        stock_reverse_order=[loss + 0.005 for loss in LOSSES],
    )
    assert compare.conclude(out, compare.STOCK_ARMS) == code
    spread = run_folder.read_json(out / "compare.json")["stock_spread"]
    assert max(spread.values()) == pytest.approx(0.01)


def test_no_spread_no_pass(tmp_path):
    curves = {"stock": LOSSES, "stock_rank_order": LOSSES, "stock_reverse_order": LOSSES}
    out = finished(tmp_path, flux=[5.0, 4.0, 3.001], **curves)
    assert compare.conclude(out, compare.STOCK_ARMS) == 1
