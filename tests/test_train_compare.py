"""The verdict of --compare on made-up curves: it must pass what agrees and fail everything else.
And what the picture of a run shows: nothing hidden.
"""

import json
import math

import pytest

pytest.importorskip("matplotlib", reason="needs the extra `bench`")

from flux_megatron.errors import BadInput
from flux_megatron.lab.train import compare, run_folder

ARMS = ("flux", *compare.STOCK_ARMS)
LOSSES = [5.0, 4.0, 3.0]


def rows(losses):
    return [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]


def finished(out, silent=0, chosen=0, **arms):
    """`out` as the runs named by `arms` leave it."""
    for arm, losses in arms.items():
        folder = out / arm.replace("_", "-")
        folder.mkdir()
        for row in rows(losses):
            run_folder.append_metrics(folder, row)
    counts = {"calls": {"ag_gemm fused": 6}, "fallbacks": {}, "overlapped": 6, "eligible": 6}
    counts |= {"chosen_sequential": chosen, "silent": silent, "run": "a run"}
    run_folder.write_json(out / "flux" / "summary.json", counts)
    return out


def judged(out) -> bool:
    return compare.conclude(out, [out / arm for arm in ARMS if (out / arm).exists()])


def result_of(out) -> dict:
    return json.loads((out / "compare.json").read_text())


def test_equal_curves_pass_and_a_call_whose_plan_is_sequential_is_distinguished(tmp_path, capsys):
    out = finished(tmp_path, chosen=2, flux=LOSSES, stock=LOSSES)
    assert judged(out)
    result = result_of(out)
    assert (result["largest_difference"], result["chosen_sequential"]) == (0, 2)
    assert "chosen sequential: 2\n" in capsys.readouterr().out
    assert (out / "compare.png").exists()


@pytest.mark.parametrize(
    ("losses", "silent"),
    [([5.0, 4.00002, 3.0], 0), ([5.0, math.nan, 3.0], 0), ([5.0, 4.0, math.inf], 0), (LOSSES, 1)],
    ids=str,
)
def test_a_step_beyond_the_tolerance_or_a_call_that_did_not_overlap_in_silence_fails(
    tmp_path, losses, silent
):
    assert not judged(finished(tmp_path, silent=silent, flux=losses, stock=LOSSES))


def test_different_steps_are_refused(tmp_path):
    with pytest.raises(BadInput, match="different steps: 2 and 3"):
        judged(finished(tmp_path, flux=LOSSES[:2], stock=LOSSES))


@pytest.mark.parametrize(
    ("shift", "half_spread", "passes"),
    [(0.0, 0.005, True), (0.009, 0.005, True), (0.03, 0.005, False), (math.nan, 0.005, False),
     (0.001, 0.0, False)],
)  # fmt: skip
def test_low_precision_is_measured_against_the_spread_of_stock(
    tmp_path, shift, half_spread, passes
):
    shifts = {"flux": shift, "stock": 0.0}
    shifts |= {"stock_rank_order": -half_spread, "stock_reverse_order": half_spread}
    curves = {arm: [loss + shift for loss in LOSSES] for arm, shift in shifts.items()}
    out = finished(tmp_path, **curves)
    assert judged(out) is passes
    assert max(result_of(out)["stock_spread"].values()) == pytest.approx(2 * half_spread)


def test_equal_losses_are_both_seen_and_steps_are_whole_numbers(monkeypatch, tmp_path):
    from matplotlib.figure import Figure

    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file: saved.append(figure))
    run_folder.draw(tmp_path / "x.png", {"flux": rows(LOSSES), "stock": rows(LOSSES)}, "4 x H200")
    axes = saved[0].axes[0]
    stock, ours = axes.lines  # ours is on top
    assert (stock.get_label(), ours.get_label()) == ("stock", "flux")
    assert stock.get_linewidth() > 3 * ours.get_linewidth()
    assert all(float(tick).is_integer() for tick in axes.get_xticks())
    assert saved[0].get_suptitle() == "4 x H200"
