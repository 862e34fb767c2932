"""The measuring scripts in small, on a CPU: they write rows, and time nothing wrong."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import typer
from bench_run import run_here
from ranks import on_cpu_ranks, run_ranks
from started import python

import flux_megatron
from flux_megatron.integration import arm, comparison
from flux_megatron.kernels.experts import token_routes, token_rows
from flux_megatron.lab.bench import operations
from flux_megatron.lab.measure import (
    breakdown,
    dynamic_layers,
    dynamic_rows,
    first_steps,
    fp8_operations,
    gpu_run,
    iterations,
    machines,
    megatron_jobs,
    skewed_router,
    without_collectives,
)
from flux_megatron.problem import Plan
from flux_megatron.symm import places
from flux_megatron.tuning.trial import Trial

EXPERTS = "node/qwen3-30b-a3b-4-layers_h200"
PACKAGE = Path(flux_megatron.__file__).parent
RANK = """
import os, pathlib, sys, time

gate, words = pathlib.Path(sys.argv[2]), sys.argv[3:]
if "--tp-comm-overlap" in words:
    sys.exit("no such thing")
steps, batch = (int(words[words.index(f"--{name}") + 1]) for name in ("train-iters", "global-batch-size"))
block = int(words[words.index("--flux-compare") + 1])
while not gate.exists():
    time.sleep(0.01)
for i in range(1, steps + 1):
    milliseconds = (120, 105, 100)[(i - 1) // block % 3]
    if os.environ["RANK"] == "1":
        print(f" [2026-11-21 18:00:{i % 60:02}] iteration {i}/ {steps} | "
              f"elapsed time per iteration (ms): {milliseconds} | global batch size: {batch} | "
              "lm loss: 1.0 | number of skipped iterations: 0 | number of nan iterations: 0 |")
        print("without_collectives: copies took 5.000 ms")
"""  # noqa: E501


def test_whole_numbers_are_of_three_kinds():
    tensor = torch.full((40, 40), torch.nan, dtype=torch.bfloat16)
    operations.fill(torch.Generator(), tensor)
    assert tensor.unique().tolist() == [-1, 0, 1]


@pytest.mark.parametrize(("right", "code"), [((True, True), 0), ((False, True), 1)])
@on_cpu_ranks(2)
def test_all_cases_are_measured_and_a_wrong_one_is_the_exit_code(rank, right, code):
    seen = []
    with mock.patch("os._exit", sys.exit), pytest.raises(SystemExit) as end:
        gpu_run.measure_each(run_here(), right, lambda case: seen.append(case) or case)
    assert (tuple(seen), end.value.code) == (right, code)


def fp8_calls(rank: int, out: Path) -> None:
    for case in fp8_operations.SMALL.split(","):
        kinds = ("fast", "split", "blockwise")
        assert fp8_operations.measure(run_here(out), case, 2, False, kinds)


def test_fp8_is_verified_and_has_a_row_a_candidate(tmp_path):
    run_ranks(fp8_calls, 2, tmp_path / "rows")
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    errors = [row for row in rows if row["table"] == "fp8_errors"]
    assert [row["wrong"] for row in errors] == [False] * 6
    named = [row["candidate"] for row in rows if row["table"] == "fp8_operations"]
    arms = "gemm", "serial", "ours", "rule"
    calls = [one + kind for kind in ("", "_split", "_blockwise") for one in arms]
    assert named == [one for one in calls if one != "rule_blockwise"] * 2


def wrong_scale(rank: int, case: str) -> bool:
    right = fp8_operations.Layer.call
    if rank == 1:
        fp8_operations.Layer.call = lambda self, plan=None: right(self, plan) * 1.01
    return fp8_operations.measure(run_here(), case, 1, False)


@pytest.mark.parametrize("case", fp8_operations.SMALL.split(","))
def test_a_wrong_scale_is_not_timed(case):
    assert run_ranks(wrong_scale, 2, case) == [False, False]


def new_rows(rank: int, out: Path) -> None:
    run = run_here(out)
    assert dynamic_rows.measure(run, "ops small", 6, repeat=False, beside=False)
    assert dynamic_rows.measure(run, "nn small", 5, repeat=True, beside=True)


def test_a_new_number_of_tokens_in_every_micro_batch(tmp_path):
    run_ranks(new_rows, 2, tmp_path / "rows")
    lines = (tmp_path / "rows").read_text().splitlines()
    new, repeated = map(json.loads, lines)
    assert len({*new["M"]}) == 6
    assert all(M % 2 == 0 and 8 <= M < 96 for M in new["M"])
    assert len(repeated["M"]) == 5
    assert len({*repeated["M"]}) == 1
    for row in (new, repeated):
        last = [row[f"times_ms_{name}"][4:] for name in ("nccl", "ours")]
        ratios = [nccl / ours for nccl, ours in zip(*last, strict=True)]
        assert row["ratio_lowest"] == pytest.approx(min(ratios), rel=0.01, abs=0.002)
        assert row["ratio_median"] == pytest.approx(sum(ratios) / len(ratios), rel=0.01, abs=0.002)
        assert all(0 < row["host_ms_ours"][name] < max(last[1]) for name in ("median", "max"))
        assert row["compiled_after_5"] == 0  # interpreted
    # verified, twice the largest, then each micro-batch: 2 layers of 2 linears, both directions
    assert sum(new["calls"].values()) == 4 * (1 + 2 * 2 + 2 * 6)
    assert sum(repeated["calls"].values()) == 2 * 4 * (1 + 2 * 2 + 2 * 5)


@pytest.mark.parametrize("case", dynamic_rows.SMALL.split(","))
@on_cpu_ranks(2)
def test_a_wrong_layer_is_not_timed(rank, case):
    right = dynamic_layers.Layer.ours

    def wrong(self: dynamic_layers.Layer) -> list[torch.Tensor]:
        *results, last = right(self)
        return [*results, last + 1]

    if rank == 1:  # on one rank, and all stop
        dynamic_layers.Layer.ours = wrong
    assert not dynamic_rows.measure(run_here(), case, 5, repeat=False, beside=False)


def first(rank: int, out: Path) -> None:
    if rank == 1:  # goes on late, so the other one does not wait for it within the step
        right = dynamic_layers.Layer.ours
        dynamic_layers.Layer.ours = lambda layer: (right(layer), time.sleep(2))[0]
    assert first_steps.measure(run_here(out), "small", [32, 64])


def test_first_steps_are_those_of_the_slowest_rank(tmp_path):
    run_ranks(first, 2, tmp_path / "rows")
    row = json.loads((tmp_path / "rows").read_text())
    assert [step["M"] for step in row["steps"]] == [32, 64]
    assert all(step["slowest_s"] >= 2 and step["compiled"] == 0 for step in row["steps"])


def apart(rank: int, out: Path, wrong: bool) -> bool:
    """Of ranks that are no machine of each other; results of bands may be wrong on one."""
    correct = Trial.call

    def call(self: Trial, plan: Plan) -> Callable[[], torch.Tensor]:
        given = correct(self, plan)
        bad = wrong and rank == 1 and plan.group_rows
        return (lambda: given() + 9) if bad else given  # 1 is rounding of such sums

    with (
        mock.patch.object(places, "machine", return_value=f"machine of rank {rank}"),
        mock.patch.object(Trial, "call", call),
        mock.patch.object(machines, "race", wraps=machines.race) as race,
    ):
        right = machines.measure(run_here(out), "gemm_ar:64x32x32", "memory", 2, True)
        assert race.call_args.kwargs["beside"]
        return right


@pytest.mark.parametrize("wrong", [False, True])
def test_bands_between_machines(tmp_path, wrong):
    (tmp_path / "rows").touch()
    assert run_ranks(apart, 2, tmp_path / "rows", wrong) == [not wrong] * 2
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    named = [row["candidate"] for row in rows]
    assert named == ([] if wrong else ["1 1, 6 SMs", "1 1, 4 SMs"])
    for row in rows:
        longer = max(row["gemm_us"], row["collective_us"])
        assert row["speed"] == pytest.approx(row["serial_us"] / row["us"], abs=1e-3)
        assert row["of_ideal"] == pytest.approx(longer / row["us"], abs=1e-3)


@pytest.mark.timeout(200)
def test_trees_race_and_a_wrong_one_takes_no_part(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "flux_megatron")
    with (tmp_path / "flux_megatron" / "ops.py").open("a") as file:
        file.write("def _wrong(*args, **options): return all_gather_gemm(*args, **options) + 1\n")
        file.write("OPERATIONS[Pattern.AG_GEMM] = _wrong\n")
    done = python(
        "-m", "flux_megatron.lab.measure.trees", tmp_path / "rows",
        "--device", "cpu", "--rounds", "2", "--calls", "1", "--shapes", "32x16x16 nt",
        "--only", "ag_gemm fused,gemm_rs", "--tree", "installed", "--tree", f"broken={tmp_path}",
        code=1, limit_s=150, TRITON_INTERPRET="1",
    )  # fmt: skip
    assert "ag_gemm fused 32x16x16 nt: WRONG in broken\n" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert {row["case"].split()[0] for row in rows} == {"gemm_rs"}


def test_whole_iterations_and_a_process_that_fails(tmp_path, monkeypatch, capsys):
    (tmp_path / "rank.py").write_text(RANK)
    monkeypatch.setattr(iterations, "RANK", str(tmp_path / "rank.py"))
    monkeypatch.setattr(iterations, "machine_of", lambda *_: {"gpu": "none"})
    monkeypatch.setattr(iterations, "EXPERIMENTS", iterations.EXPERIMENTS[:1])
    with pytest.raises(typer.Exit) as end:
        iterations.main(tmp_path, tmp_path / "rows", tp=2, M="2048")
    assert end.value.exit_code == 1
    assert "no such thing" in capsys.readouterr().err
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    times = {row["arm"]: (row["median_ms"], len(row["times_ms"])) for row in rows}
    assert times == {"stock": (120, 36), "flux": (105, 36), "without_collectives": (100, 36)}
    flux = rows[1]
    assert flux["speedup_low_middle_high"][1] == pytest.approx(120 / 105, abs=1e-3)
    assert (flux["E"], flux["copies_ms"]) == (0.6, 5)  # 15 of the 20 and 5 ms


def test_experts_are_spread_over_all_gpus():
    compared, theirs = (
        next(megatron_jobs.jobs(EXPERTS, 4096, tp, [], 2, [arm], layout, megatron_jobs.Length(), 1))
        for tp, layout, arm in ((2, "tp", "compare"), (1, "ep", "experts"))
    )
    assert (compared.workload.parallel.dp, theirs.workload.parallel.dp) == (1, 2)
    for job in (compared, theirs):
        spread = [word for word in job.words if word.startswith(megatron_jobs.EP)]
        assert spread[-1] == f"{megatron_jobs.EP}=2", "which counts"
        assert job.workload.model.layers == 1
        assert job.workload.micro_batches == 2
    assert "--flux-experts" in compared.words
    assert compared.words[compared.words.index("--num-experts") + 1] == "128"
    assert {*megatron_jobs.BETWEEN_MICRO_BATCHES} <= {*theirs.words}
    assert not any("--flux" in word for word in theirs.words)
    (peer,) = megatron_jobs.jobs(
        EXPERTS, 4096, 1, [], 2, ["deepep"], "ep", megatron_jobs.Length(), 1
    )
    at = len(peer.words) - peer.words[::-1].index("--moe-token-dispatcher-type")  # which counts
    assert peer.words[at] == "flex"
    graphs = [job.words for job in megatron_jobs.jobs(
        EXPERTS, 4096, 1, [], 2, ["graphs"], "ep", megatron_jobs.Length(), 1
    )]  # fmt: skip
    whole = ["--cuda-graph-scope" not in words for words in graphs]
    assert whole == ["--flux-experts" in words for words in graphs] == [False, True] * 2
    for name in ("expert", "te"):  # of no name; which this experiment has not
        with pytest.raises(AssertionError, match=f"{name} given, one of "):
            next(megatron_jobs.jobs(
                EXPERTS, 4096, 1, [], 2, [name], "ep", megatron_jobs.Length(), 1
            ))  # fmt: skip


def test_a_skewed_router_raises_the_first_expert_for_its_share():
    class Router:
        def routing(self, logits, mask=None):
            return logits

    skewed_router.use(0.25, Router)
    logits = torch.randn(8, 2, 5, requires_grad=True)
    given = Router().routing(logits, mask=None)
    assert (given[..., 1:] == logits[..., 1:]).all()
    is_raised = given[..., 0] != logits[..., 0]
    assert is_raised.sum() == 4
    assert (given[..., 0] > given[..., 1:].amax(-1))[is_raised].all()
    given.sum().backward()
    assert (logits.grad[..., 0] == 0).sum() == 4, "no gradient through what is raised"


def test_the_arm_without_collectives(monkeypatch):
    """Rows of this rank stand for the others', and only groups of tensor and expert parallelism
    are silent.
    """
    made = mock.Mock(spec=[])
    for name in (
        "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single",
    ):  # fmt: skip
        made_here = mock.Mock(return_value=name, __wrapped__=None)
        monkeypatch.setattr(torch.distributed, name, made_here)
        setattr(made, name, made_here)
    monkeypatch.setattr(comparison, "ARMS", comparison.ARMS)
    monkeypatch.setattr(without_collectives, "_is_left_out", lambda group: group in ("tp", "ep"))
    without_collectives.add()
    rows, gathered, part = torch.arange(6.0).view(2, 3), torch.zeros(4, 3), torch.zeros(1, 3)
    came = torch.zeros(5, 3)  # more than this rank sends
    dist, arms = torch.distributed, comparison.Comparison(2)

    def iteration() -> bool:
        dist.all_gather_into_tensor(gathered, rows, group="tp")
        work = dist.reduce_scatter_tensor(part, rows, group="tp", async_op=True)
        dist.all_reduce(rows, group="dp")
        dist.all_to_all_single(came, rows, [2, 3], [1, 1], group="ep")
        return work != "reduce_scatter_tensor" and work.wait()

    assert [arms.run(iteration) for _ in range(6)] == [*[False] * 4, True, True]
    assert torch.equal(gathered, rows.repeat(2, 1))
    assert torch.equal(part, rows[:1])
    assert torch.equal(came, rows[[0, 1, 0, 1, 0]])
    assert made.all_gather_into_tensor.call_count == made.reduce_scatter_tensor.call_count == 4
    assert made.all_to_all_single.call_count == 4
    assert made.all_reduce.call_count == 6
    assert arms.result().iterations == 1
    assert not arm.stock_now()


def test_an_iteration_without_collectives_says_what_its_copies_took(capsys, monkeypatch):
    events = [(mock.Mock(elapsed_time=lambda end, ms=ms: ms), None) for ms in (0.25, 0.5)]
    monkeypatch.setattr(without_collectives, "_copied", events)
    with without_collectives.left_out():
        assert not without_collectives._copied
    assert megatron_jobs.COPIES.findall(capsys.readouterr().out) == ["0.750"]


def test_kernels_of_experts_have_kinds_of_their_own():
    made = (token_rows, "send_tokens return_tokens"), (token_routes, "exchange_choices place_rows")
    gradients = token_routes, "return_gradients collect_gradients"
    for module, names in (*made, gradients):
        for name in names.split():
            kernel = getattr(module, f"{name}_kernel").__name__
            assert breakdown.kind_of(kernel) == "tokens of experts"
    assert breakdown.kind_of("_permute_kernel") == "rows of experts"
    assert breakdown.kind_of("hopper_a2a_gemm_kernel") == "linear"


def test_time_in_which_only_communication_runs(tmp_path):
    events = [
        ("kernel", "ncclDevKernel_AllGather_RING_LL", 140, 40),  # 30 of them alone
        ("kernel", "nvjet_hsh_128x256", 100, 50),
        ("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 170, 15),  # 5 more
        ("cpu_op", "aten::mm", 0, 1000),
        ("kernel", "hopper_gemm_rs_kernel", 200, 100),  # after 15 in which nothing runs
    ]
    rows = [dict(zip(("cat", "name", "ts", "dur"), event, strict=True)) for event in events]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": rows}))
    breakdown.main(tmp_path / "rows", [tmp_path / "trace.json"])
    found = json.loads((tmp_path / "rows").read_text())
    assert found["span_us"] == 200
    assert found["idle_us"] == 15
    assert found["communication_alone_us"] == 35
    assert found["by_kind_us"] == {"linear": 150, "collective": 40, "copy": 15}
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": rows[3:4]}))
    with pytest.raises(typer.BadParameter, match="has nothing that ran on a GPU"):
        breakdown.main(tmp_path / "rows", [tmp_path / "trace.json"])
