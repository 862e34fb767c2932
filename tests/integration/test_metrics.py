"""What a launch shows: the line after Megatron's, the scalars, and stock against fused in turn."""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import re
import sys
import time
import types
from statistics import fmean, stdev

import pytest
import side_by_side as sbs
import torch

import flux_megatron
from flux_megatron.integration import arm, coverage, metrics, step_check
from flux_megatron.integration.apex_shim import provide_wgrad_kernels
from flux_megatron.integration.comparison import (
    FEWEST_PAIRS,
    RESAMPLES,
    Comparison,
    alternate,
    speedup,
)
from flux_megatron.integration.flags import options_from
from flux_megatron.ops import note_fallback
from flux_megatron.overlap import report as report_module
from flux_megatron.overlap.report import Layers, note_call, note_layers


@pytest.fixture(autouse=True)
def _fresh_report():
    """Counts of this process, which ranks that other tests fork would inherit."""
    flux_megatron.reset_report()
    yield
    flux_megatron.reset_report()


def noisy_pairs(seed: int, pairs: int, gain: float = 1.0):
    """Blocks of four iterations of 1 s, of which the fused ones are faster by `gain`."""
    draw = random.Random(seed)

    def iterations(mean: float) -> list[float]:
        return [mean * draw.gauss(1, 0.02) for _ in range(4)]

    return [(iterations(1.0), iterations(1 / gain)) for _ in range(pairs)]


def test_planted_speedup_is_found():
    results = [speedup(noisy_pairs(seed, 10, gain=1.05)) for seed in range(100)]
    assert sum(result.significant for result in results) >= 95
    assert sum(low <= 1.05 <= high for low, high in (r.interval for r in results)) >= 90
    text = str(results[0])
    assert re.fullmatch(r"1\.0\d\dx \(95 %: 1\.\d+ to 1\.\d+\), 40 iterations of each arm", text)
    assert str(speedup(noisy_pairs(0, 10, gain=1.05))) == text


def test_outlier_within_a_block_does_not_count():
    pairs = noisy_pairs(0, 10, gain=1.05)
    pairs[3][1][0] = 60.0
    assert speedup(pairs).significant


def test_the_interval_is_the_bootstrap_t_by_its_definition():
    """Both deviations are over n - 1 = 4, and 2.5 % of the resamples lie beyond either end."""
    logs = [0.0, 0.01, 0.02, 0.03, 0.1]
    generator = torch.Generator().manual_seed(0)
    ts = []
    for picked in torch.randint(5, (RESAMPLES, 5), generator=generator).tolist():
        some = [logs[i] for i in picked]
        above = fmean(some) - fmean(logs)
        ts.append(above / stdev(some) if len({*some}) > 1 else math.copysign(math.inf, above))
    ts.sort()
    tail = RESAMPLES // 40
    high, low = (math.exp(fmean(logs) - t * stdev(logs)) for t in (ts[tail], ts[-1 - tail]))
    found = speedup([([math.exp(log)] * 4, [1.0] * 4) for log in logs])
    assert found.interval == pytest.approx((low, high), rel=1e-4)
    assert low <= 1 <= high
    assert not found.significant
    assert "), not significant, 20 iterations of each arm" in str(found)


def test_few_pairs_have_no_interval():
    result = speedup(noisy_pairs(0, FEWEST_PAIRS - 1))
    assert result.interval is None
    assert not result.significant
    assert str(result).endswith(
        f"x, {FEWEST_PAIRS - 1} of the {FEWEST_PAIRS} pairs for an interval"
    )


def test_blocks_alternate_and_their_first_iteration_does_not_count(monkeypatch):
    """Stock takes 3 s and fused 2 s; the first iteration of a block takes a minute more."""
    now, arms = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    comparison = Comparison(3)

    def iteration() -> str:
        first = not arms or len(arms) % 3 == 0
        arms.append("stock" if arm.stock_now() else "fused")
        now[0] += (3.0 if arm.stock_now() else 2.0) + 60.0 * first
        return "loss"

    for count in range(1, 15):
        assert comparison.run(iteration) == "loss"
        assert not arm.stock_now()
        assert (comparison.result() is None) == (count < 6)
    assert arms == ["stock"] * 3 + ["fused"] * 3 + ["stock"] * 3 + ["fused"] * 3 + ["stock"] * 2
    result = comparison.result()
    assert result.ratio == pytest.approx(1.5)
    assert (result.pairs, result.iterations) == (2, 4)


def test_arm_ends_with_a_failing_iteration():
    comparison = Comparison(2)
    with pytest.raises(ZeroDivisionError):
        comparison.run(lambda: 1 / 0)
    assert not arm.stock_now()


CASES = [
    (kind, sp, fusion) for kind in sbs.PAIRS for sp in (True, False) for fusion in (True, False)
]


@pytest.mark.parametrize(("kind", "sp", "fusion"), CASES)
@sbs.on_tp_ranks(2)
def test_stock_arm_is_megatron_s_own_code(rank, kind, sp, fusion):
    provide_wgrad_kernels()
    config = sbs.settings(2, sp, torch.float32, gradient_accumulation_fusion=fusion)

    def prepare(layer) -> None:
        if fusion:
            layer.weight.main_grad = torch.ones_like(layer.weight)

    case = sbs.Case(kind, prepare=prepare)
    x, dy = (t.float() for t in sbs.operands(case, sp))
    expected = sbs.use(case, sbs.build(case, False, config), x, dy)
    layer = sbs.build(case, True, config)
    with arm.use(stock=True):
        got = sbs.use(case, layer, x, dy)
    sbs.assert_same(got, expected)
    assert flux_megatron.report().total == 0
    sbs.use(case, layer, x, dy)  # a column layer without sequence parallelism sums dx alone
    assert flux_megatron.report().total > 0


class Writer(list):
    """TensorBoard's and W&B's in one."""

    def add_scalar(self, name, value, iteration) -> None:
        self.append((name, value, iteration))

    def log(self, scalars, iteration) -> None:
        self.append((scalars, iteration))


def training_module(old: bool = False, log_interval: int = 2):
    """What stands for megatron.training.training, as 0.14 calls it or as 0.16 and newer do."""
    module = types.ModuleType(metrics.TRAINING)
    module.printed, module.board, module.wandb = [], Writer(), Writer()
    module.get_tensorboard_writer = lambda: module.board
    module.get_wandb_writer = lambda: None if old else module.wandb
    module.get_args = lambda: argparse.Namespace(log_interval=log_interval)
    module.print_rank_last = module.printed.append

    def training_log_old(loss_dict, total_loss_dict, learning_rate, iteration, loss_scale):
        module.printed.append(f" iteration {iteration}")
        return "report memory"

    def training_log(loss_dict, learning_rate, iteration, loss_scale, *, is_first_iteration=False):
        module.printed.append(f" iteration {iteration}")
        return "report memory"

    def train_step(forward_step_func, *more, iteration=None):
        note_call("ag_gemm", "sequential" if arm.stock_now() else "fused")
        return forward_step_func, more, iteration

    module.training_log = training_log_old if old else training_log
    module.train_step = train_step
    module.save_checkpoint = lambda: None
    module.setup_model_and_optimizer = lambda: ([], None, None)
    return module


def log(module, iteration: int) -> None:
    given = ({}, {}, 1e-3, iteration, 1.0) if module.get_wandb_writer() is None else (
        {}, 1e-3, iteration, 1.0)  # fmt: skip
    assert module.training_log(*given) == "report memory"


def test_layers_are_reported_where_they_are_counted(monkeypatch):
    monkeypatch.setattr(report_module, "_models", [])
    module = training_module()
    metrics.log_with(module, None)
    for iteration in range(1, 5):
        if iteration == 3:
            note_layers(Layers(8, 9, {("output_layer", "it is another class"): 1}))
        log(module, iteration)
    assert [line for line in module.printed if line.startswith(" flux")] == [
        " flux: 0 of 0 calls overlapped | 0 fallbacks | workspace 0.0 MiB",
        " flux: ours 8 of 9 layers | 0 of 0 calls overlapped | 0 fallbacks | workspace 0.0 MiB",
    ]
    assert ("flux/layers-ours", 8, 4) in module.board
    assert ("flux/layers", 9, 4) in module.board


@pytest.mark.parametrize("old", [True, False], ids=["0.14", "0.16"])
def test_line_and_scalars_are_of_what_happened_since_the_last(old):
    note_call("gemm_rs", "fused")  # before the loop
    module = training_module(old)
    metrics.log_with(module, None)
    for iteration in range(1, 7):
        note_call("ag_gemm", "fused")
        if iteration in (3, 4, 6):
            with pytest.warns() if iteration == 3 else contextlib.nullcontext():
                note_fallback("gemm_rs", "nodes differ")
        log(module, iteration)
    flux = [line for line in module.printed if line.startswith(" flux")]
    assert flux == [
        " flux: 2 of 2 calls overlapped | 0 fallbacks | workspace 0.0 MiB",
        " flux: 2 of 4 calls overlapped | 2 fallbacks (gemm_rs: nodes differ) | workspace 0.0 MiB",
        " flux: 2 of 3 calls overlapped | 1 fallbacks | workspace 0.0 MiB",
    ]
    assert module.printed.index(flux[0]) == module.printed.index(" iteration 2") + 1
    assert module.board[3:6] == [
        ("flux/overlapped-calls", 2, 4), ("flux/fallbacks", 2, 4), ("flux/workspace-MiB", 0.0, 4)
    ]  # fmt: skip
    scalars = {"flux/overlapped-calls": 2, "flux/fallbacks": 1, "flux/workspace-MiB": 0.0}
    assert module.wandb[2:] == ([] if old else [(scalars, 6)])


def test_first_iteration_is_logged_where_megatron_logs_it():
    module = training_module(log_interval=100)
    metrics.log_with(module, None)
    module.training_log({}, 1e-3, 1, 1.0, is_first_iteration=True)
    module.training_log({}, 1e-3, 2, 1.0, is_first_iteration=False)
    assert [line[:6] for line in module.printed] == [" itera", " flux:", " itera"]


def test_comparison_is_reported_when_it_knows_more():
    module = training_module(log_interval=1)
    metrics.log_with(module, alternate(module, 2))
    for iteration in range(1, 10):
        got = module.train_step("forward", 1, 2, iteration=iteration)
        assert got == ("forward", (1, 2), iteration)
        log(module, iteration)
    lines = [line for line in module.printed if line.startswith(" flux")]
    overlapped = [int(line.split()[1]) for line in lines if "overlapped" in line]
    assert overlapped == [0, 0, 1, 1, 0, 0, 1, 1, 0]
    logged = [lines.index(line) for line in lines if "pairs for an interval" in line]
    assert logged == [4, 9]  # after iterations 4 and 8


def test_installing_twice_is_installing_once(monkeypatch):
    monkeypatch.setattr(metrics.atexit, "register", lambda *_: None)
    module = training_module()
    monkeypatch.setitem(sys.modules, metrics.TRAINING, module)
    metrics.install(3)
    once = module.training_log, module.train_step
    metrics.install(3)
    assert (module.training_log, module.train_step) == once


def test_installing_checks_counts_logs_and_compares(monkeypatch):
    """Each does its part, called as Megatron's loop calls it."""
    calls, module = [], training_module(log_interval=1)
    monkeypatch.setattr(step_check, "confirm_step", lambda: calls.append("confirm"))
    monkeypatch.setattr(metrics.atexit, "register", lambda call, *_: calls.append(call.__name__))
    monkeypatch.setattr(report_module, "_models", [])
    monkeypatch.setattr(coverage, "_of_all_stages", lambda stage: stage)
    monkeypatch.setitem(sys.modules, metrics.TRAINING, module)
    step = types.SimpleNamespace(step=lambda: calls.append("update"))

    def train_step(forward_step_func, optimizer):
        calls.append("stock" if arm.stock_now() else "fused")
        optimizer.step()

    module.train_step = train_step
    metrics.install(2)
    module.setup_model_and_optimizer()
    for iteration in range(1, 4):
        module.train_step(None, step)
        log(module, iteration)
    module.save_checkpoint()
    updates = " ".join(f"{name} confirm update" for name in ("stock", "stock", "fused"))
    assert calls == ["_log_at_exit", *updates.split(), "confirm"]
    assert flux_megatron.report().layers is not None
    assert sum(line.startswith(" flux: ours") for line in module.printed) == 3


def test_without_megatron_s_loop_nothing_can_be_compared(monkeypatch):
    monkeypatch.delitem(sys.modules, metrics.TRAINING, raising=False)
    metrics.install(None)
    with pytest.raises(ValueError, match=r"--flux-compare given, but megatron\.training\.training"):
        metrics.install(3)


def options(*given: str, **more):
    args = sbs.parse(*given)
    vars(args).update(more)
    return options_from(args)


def test_compare_takes_blocks_of_two_or_more_and_no_cuda_graphs():
    compare = ("--flux-overlap", "--flux-compare")
    assert options(*compare, "10", cuda_graph_impl="none", enable_cuda_graph=False).compare == 10
    with pytest.raises(ValueError, match="--flux-compare 1 given, 2 or more expected"):
        options(*compare, "1")
    for graphs in (
        {"cuda_graph_impl": "local"}, {"enable_cuda_graph": True}, {"external_cuda_graph": True}
    ):  # fmt: skip
        with pytest.raises(ValueError, match="--flux-compare given with CUDA graphs"):
            options(*compare, "10", **graphs)
    with pytest.raises(ValueError, match="--flux-compare given without --flux-overlap"):
        options("--flux-compare", "10")
