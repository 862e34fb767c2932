"""The harness without a checkout: what is drawn is known to Megatron, and it sees a difference."""

from __future__ import annotations

import copy

import comparison
import drawing
import pytest
import te_cases
import torch

from flux_megatron.integration.parser_signature import check, recorded, releases

NUMBERS = range(40)


@pytest.mark.parametrize("release", releases())
def test_what_is_drawn_is_known_to_the_release(release):
    for number in NUMBERS:
        drawn = drawing.draw(release, 1, number)
        assert check([*drawn.arguments, *drawn.ours], release) == []
        assert drawn == drawing.draw(release, 1, number)


def _record(**changes):
    entry = {"iteration": 1, "lm loss": 4.0, "grad_norm": 2.0, "skipped_iter": 0.0} | changes
    weight = torch.arange(4.0)
    state = {"w": weight, "optimizer 0 parameter 0 exp_avg": weight / 10}
    calls = {"total": 2, "overlapped": 2, "fallbacks": {}}
    return {"iterations": [entry], "evaluations": [], "state": state, "calls": calls}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lm loss": 4.0001}, "loss differs"),
        ({"lm loss": float("nan")}, "loss differs"),
        ({"lm loss": None}, "lm loss of stock"),
        ({"grad_norm": 2.001}, "grad norm differs"),
        ({"skipped_iter": 1.0}, "skipped_iter of stock"),
        ({"mtp loss": 1.0}, "others of ours"),
    ],
)
def test_another_iteration_is_a_difference(changes, words):
    found = comparison.compare([_record()], [_record(**changes)], None)
    assert words in found.wrong[0]


@pytest.mark.parametrize("name", ["w", "optimizer 0 parameter 0 exp_avg"])
def test_another_state_is_a_difference(name):
    ours = copy.deepcopy(_record())
    ours["state"][name][1] += 1e-3
    assert "differs" in comparison.compare([_record()], [ours], None).wrong[0]
    del ours["state"][name]
    assert "other names" in comparison.compare([_record()], [ours], None).wrong[0]


def test_half_precision_is_held_against_stock_s_own_distance():
    reference, stock = _record(), _record(**{"lm loss": 4.004})

    def wrong(loss):
        ours = _record(**{"lm loss": loss})
        return comparison.compare([stock], [ours], [reference], "bf16").wrong

    assert wrong(3.994) == []
    assert "lm loss of ours" in wrong(3.98)[0]


def test_megatron_knows_the_options_of_every_launch():
    ours = {"--flux-overlap", "--flux-layers", "--flux-strict", "--flux-deterministic"}
    known = {*recorded()["core_v0.16.1"], *ours}
    for case in {**te_cases.CASES, **te_cases.IN_FP8}:
        for arm in te_cases.ARMS:
            words = te_cases.arguments(case, arm)
            assert {word for word in words if word.startswith("--")} <= known
