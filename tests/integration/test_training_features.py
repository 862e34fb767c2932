"""Every feature of a training run, on our layers and on stock ones: the same losses and weights.

What "the same" means is docs/tests.md; docs/support.md lists the features. Those that are
quick are tested always, all with two strategies under FLUX_MEGATRON_ALL_FEATURES=1.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest
import side_by_side as sbs
import support_page
import torch
from ranks import FUSED, be_late, on_cpu_ranks, run_ranks
from training_breaks import BREAKS, Break, terms_missing
from training_cases import ALL, FEATURES, QUICKEST, REFUSED
from training_run import Feature, Training

import flux_megatron
from flux_megatron.integration.layers import FluxColumnParallelLinear, FluxRowParallelLinear
from flux_megatron.lab.train.compare import FLOAT32_TOLERANCE, STOCK_ARMS, judge_exact, judge_spread
from flux_megatron.overlap.report import Report

CHOSEN = [name for name, feature in FEATURES.items() if ALL or feature.quick]
BROKEN = [*FEATURES] if ALL else ["sequence parallel", "sequence parallel off", "wgrad fusion"]


@dataclass(frozen=True)
class Outcome:
    """What one rank saw: losses by arm, mean and largest difference of weights by pair of arms."""

    losses: dict[str, list[float]]
    differences: dict[tuple[str, str], tuple[float, float]]
    moved: float
    report: Report
    forwards: int
    calls: int


@pytest.mark.parametrize("strategy", [QUICKEST, "fused"] if ALL else [QUICKEST])
@pytest.mark.parametrize("name", CHOSEN)
def test_feature_follows_stock(name, strategy):
    sbs.skip_where_mtp_needs_te(FEATURES[name].config)
    if name == "MoE, shared experts":
        sbs.skip_before("0.15", "on a CPU their dispatcher modifies a view in place")
    assert not errors(FEATURES[name], outcomes(name, strategy))


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_seen(name):
    broken = BREAKS.get(name, terms_missing)
    assert errors(FEATURES[name], outcomes(name, QUICKEST, broken))


def outcomes(name: str, strategy: str, broken: Break = contextlib.nullcontext) -> list[Outcome]:
    """Of each rank; `broken` is entered around our run."""
    environment = {"FLUX_MEGATRON_STRATEGY": strategy}
    return run_ranks(_train, FEATURES[name].world_size, name, broken, environment=environment)


def _train(rank: int, name: str, broken: Break) -> Outcome:
    feature = FEATURES[name]
    sbs.give_stock_a_wgrad_kernel()
    losses, weights = {}, {}
    for arm in (*(STOCK_ARMS if feature.low_precision else STOCK_ARMS[:1]), "flux"):
        flux_megatron.reset_report()
        training = Training(feature, arm)
        before = training.weights()
        seen = _Seen(training.modules, feature.sp)
        with broken() if arm == "flux" else contextlib.nullcontext():
            losses[arm] = training.run(feature.steps)
        weights[arm] = training.weights()
    return Outcome(
        losses=losses,
        differences={
            pair: _differences(*(weights[arm] for arm in pair)) for pair in combinations(weights, 2)
        },
        moved=_differences(before, weights["flux"])[1],
        report=flux_megatron.report(),
        forwards=seen.forwards,
        calls=seen.calls,
    )


def _differences(some: dict, other: dict) -> tuple[float, float]:
    assert some.keys() == other.keys()
    apart = [(some[name].double() - other[name].double()).abs().flatten() for name in some]
    return torch.cat(apart).mean().item(), torch.cat(apart).max().item()


class _Seen:
    """How often our layers had communication: in forwards, and in backwards that came to them.

    Without sequence parallelism row layers have it in forward, column layers in backward.
    """

    def __init__(self, modules: list, sp: bool) -> None:
        self.forwards = self.calls = 0
        self.sp = sp
        for layer in (layer for module in modules for layer in module.modules()):
            ours = isinstance(layer, (FluxColumnParallelLinear, FluxRowParallelLinear))
            if ours and not layer.explicit_expert_comm:
                layer.register_forward_hook(self._forward)

    def _forward(self, layer: Any, inputs: Any, outputs: Any) -> None:
        self.forwards += 1
        column = isinstance(layer, FluxColumnParallelLinear)
        self.calls += self.sp or not column
        if outputs[0].requires_grad and (self.sp or column):
            outputs[0].register_hook(self._backward)

    def _backward(self, gradient: torch.Tensor) -> None:
        self.calls += 1


def errors(feature: Feature, ranks: list[Outcome]) -> list[str]:
    """Everything in which our run is not as it should be."""
    found = [c for rank in ranks for c in _how_it_ran(feature, rank)]
    judge = judge_spread if feature.low_precision else judge_exact
    with_losses = [rank.losses for rank in ranks if rank.losses["flux"]]
    for losses in with_losses:
        curves = {arm: [{"step": step, "loss": loss} for step, loss in enumerate(values)]
                  for arm, values in losses.items()}  # fmt: skip
        if not judge(curves)["losses_agree"]:
            found.append(f"losses {losses}")
    if not with_losses or min(rank.moved for rank in ranks) < 100 * FLOAT32_TOLERANCE:
        found.append("nothing was learned")
    return found + _weights_differ(feature, [rank.differences for rank in ranks])


def _weights_differ(feature: Feature, ranks: list[dict]) -> list[str]:
    if not feature.low_precision:
        largest = max(rank["stock", "flux"][1] for rank in ranks)
        return [] if largest <= FLOAT32_TOLERANCE else [f"a weight differs by {largest}"]
    means = {pair: sum(rank[pair][0] for rank in ranks) / len(ranks) for pair in ranks[0]}
    nearest = min(mean for pair, mean in means.items() if "flux" in pair)
    spread = max(mean for pair, mean in means.items() if "flux" not in pair)
    return [] if nearest <= spread else [f"weights differ: {means}"]


def _how_it_ran(feature: Feature, rank: Outcome) -> list[str]:
    """Each call overlapped, or else each forward counted, with the reason that was expected."""
    report = rank.report
    if feature.runs == "overlapped":
        right = rank.calls and report.overlapped == report.total == rank.calls
    else:
        reasons = {reason for _, reason in report.fallbacks}
        right = reasons and all(feature.runs in reason for reason in reasons)
        right = right and not report.chosen_sequential and report.total >= rank.forwards
    return [] if right else [f"{rank.forwards} forwards, {rank.calls} calls, but {report}"]


@on_cpu_ranks(2, environment=FUSED)
def test_a_run_in_deterministic_mode_repeats_every_bit(rank):
    """The second time another rank is the late one."""
    torch.use_deterministic_algorithms(True)
    feature, left = FEATURES["deterministic mode"], []
    for late in range(2):
        training = Training(feature, "flux")
        for layer in training.modules[0].decoder.layers:
            layer.register_forward_pre_hook(lambda *_, late=late: be_late(0.02 * (rank == late)))
        left.append((training.run(1), training.weights()))
    sbs.assert_same(*left)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_start_up_by_name(name):
    run_ranks(_refused, REFUSED[name][0].world_size, name)


def _refused(rank: int, name: str) -> None:
    feature, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        Training(feature, "flux")


def test_the_tables_of_the_page_are_up_to_date():
    page = support_page.PAGE.read_text()
    old = "docs/support.md is old: python tests/integration/support_page.py"
    assert support_page.renewed(page) == page, old
