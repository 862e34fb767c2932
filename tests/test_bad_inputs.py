"""Calls that cannot work: every rank gets the reason, none hangs, and the next call works."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from cases import Case, check
from ranks import DEVICE, FUSED, on_device
from torch.testing._internal.two_tensor import TwoTensor

import flux_megatron
from flux_megatron import errors, ops, settings
from flux_megatron.nn.functions import column_parallel_linear, row_parallel_linear
from flux_megatron.problem import Plan
from flux_megatron.symm import workspace as workspaces

SHORT = {"FLUX_MEGATRON_TIMEOUT_S": "2"}
RANKS = 3 if DEVICE == "cpu" else 2  # of which rank 1 makes another call than the others
LONG = {"FLUX_MEGATRON_TIMEOUT_S": "8"}  # what a wait that nobody ends would take
SOON_S = 4.0
GATHER, SCATTER = ops.all_gather_gemm, ops.gemm_reduce_scatter
STRATEGIES = {
    GATHER: ["low_latency", "hopper", "fused", "pipelined", "signalled", "sequential"],
    SCATTER: ["low_latency", "hopper", "fused", "pipelined", "signalled", "sequential"],
}


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=DEVICE)


def text(*shape: int, dtype: str = "float32", device: str = DEVICE) -> str:
    device = f"{device}:{torch.cuda.current_device()}" if device == "cuda" else device
    return f"{list(shape)} {dtype} on {device}"


def bad_calls() -> dict[str, tuple[Callable, list[str]]]:
    """Calls of a group of 2, and what each message must contain."""
    w = tensor(5, 4)
    group = dist.group.WORLD
    calls: dict[str, tuple[Callable, list[str]]] = {
        "rows": (
            lambda: SCATTER(tensor(7, 4), w, group),
            [f"x {text(7, 4)} given", "divisible by the group's 2 ranks expected"],
        ),
        "first dimension": (
            lambda: row_parallel_linear(tensor(3, 2, 4), w, group=group),
            ["x [3, 2, 4] given", "divisible by the group's 2 ranks expected"],
        ),
        "bias shape": (
            lambda: GATHER(tensor(6, 4), w, group, bias=tensor(4)),
            [f"bias {text(4)} given", "[5] torch.float32 expected"],
        ),
        "integer bias": (
            lambda: GATHER(tensor(6, 4), w, group, bias=tensor(5, dtype=torch.int32)),
            [f"bias {text(5, dtype='int32')} given", "[5] torch.float32 expected"],
        ),
        "weight of a layer": (
            lambda: column_parallel_linear(tensor(3, 2, 6), w, None, group=group),
            [f"x {text(6, 6)} and w {text(5, 4)} given", "equal K expected for layout 'nt'"],
        ),
    }
    for op in (GATHER, SCATTER):
        x, integers = tensor(6, 4), tensor(6, 4, dtype=torch.int32)
        calls |= {
            f"{op.__name__}: {name}": (lambda op=op, a=given, o=options: op(*a, group, **o), words)
            for name, given, options, words in [
                ("integers", (integers, w.int()), {}, ["int32", "one floating-point dtype"]),
                ("two dtypes", (x, w.half()), {},
                 [f"x {text(6, 4)} and w {text(5, 4, dtype='float16')} given", "one floating"]),
                ("K", (tensor(6, 3), w), {},
                 [f"x {text(6, 3)} and w {text(5, 4)} given", "equal K"]),
                ("K of nn", (x, w), {"layout": "nn"}, ["equal K expected for layout 'nn'"]),
                ("one dimension", (tensor(4), w), {}, [f"x {text(4)}", "two matrices expected"]),
                ("three dimensions", (tensor(2, 3, 4), w), {}, ["two matrices expected"]),
                ("no rows of another K", (tensor(0, 3), w), {}, ["equal K expected"]),
                ("no columns", (x, tensor(0, 4)), {}, ["no empty dimension expected"]),
                ("sparse w", (x, w.to_sparse()), {},
                 ["w with the layout torch.sparse_coo given, a dense tensor expected"]),
                ("wrapped x", (TwoTensor(x, x), w), {},
                 ["x of the type torch.testing._internal.two_tensor.TwoTensor given"]),
                ("layout", (x, w), {"layout": "tn"},
                 ["layout 'tn' given, one of ('nt', 'nn') expected"]),
                ("strategy", (x, w), {"plan": Plan("magic")},
                 ["strategy 'magic' given", f"one of {STRATEGIES[op]} expected"]),
                ("unsupported plan", (x.double(), w.double()), {"plan": Plan("fused")},
                 ["cannot run", "dtype float64 is none of float32, bfloat16, float16"]),
            ]
        }  # fmt: skip
    return calls


def all_are_bad(rank: int) -> None:
    check(Case("ag_gemm", 3, 5, 4))
    check(Case("gemm_rs", 3, 5, 4))
    for op in (GATHER, SCATTER):  # the shapes of most bad calls: what was checked is known by now
        op(tensor(6, 4), tensor(5, 4), dist.group.WORLD)
    GATHER(tensor(6, 4), tensor(5, 4), dist.group.WORLD, bias=tensor(5))
    for name, (bad, words) in bad_calls().items():
        with pytest.raises(ValueError, match=r"given|cannot run") as caught:
            bad()
        for word in words:
            assert word in str(caught.value), f"{name}: {word!r} is not in {caught.value}"
    for pattern in ("ag_gemm", "gemm_rs"):
        check(Case(pattern, 3, 5, 4))
        check(Case(pattern, 7, 2, 3))


def test_every_rank_gets_the_error_and_the_group_still_works():
    on_device(all_are_bad, 2)


def other_settings(rank: int) -> list[str]:
    """The strategies of one call, which is known, under one setting after the other."""
    took = []
    for wanted in ("fused", "pipelined", "fused", "sequential"):
        os.environ["FLUX_MEGATRON_STRATEGY"] = wanted
        settings.reload()
        flux_megatron.reset_report()
        check(Case("gemm_rs", 3, 5, 4))
        took += {strategy for _, strategy in flux_megatron.report().calls}
    return took


@pytest.mark.skipif(DEVICE == "cuda", reason="GPU ranks serve other tests, with these settings")
def test_new_settings_count_for_calls_that_are_known():
    for took in on_device(other_settings, 2):
        assert took == ["fused", "pipelined", "fused", "sequential"]


def another_device(rank: int) -> list[str]:
    group = dist.group.WORLD
    check(Case("ag_gemm", 3, 5, 4))
    said = []
    for x, w in (
        (tensor(6, 4).to("meta"), tensor(5, 4).to("meta")),
        (tensor(6, 4), tensor(5, 4).to("meta")),
    ):
        with pytest.raises(ValueError, match="given") as caught:
            ops.run_ag_gemm(x, w, None, group)
        said.append(str(caught.value))
    check(Case("ag_gemm", 3, 5, 6))
    return said


def test_another_device_is_refused():
    for first, second in on_device(another_device, 2):
        assert "[6, 4] float32 on meta given" in first
        assert "where the group's first call was" in first
        assert "[5, 4] float32 on meta given, one device expected" in second


def _completed(call: Callable) -> None:
    call()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    workspaces.check()


def seconds_until(error: type[Exception], call: Callable) -> tuple[str, float]:
    started = time.monotonic()
    with pytest.raises(error) as caught:
        _completed(call)
    return str(caught.value), time.monotonic() - started


def different_problems(rank: int) -> tuple[str, float]:
    group = dist.group.WORLD
    check(Case("gemm_rs", 3, 5, 4))
    answer = seconds_until(
        errors.ProblemMismatch, lambda: GATHER(tensor(6, 4 + rank), tensor(5, 4 + rank), group)
    )
    check(Case("gemm_rs", 3, 5, 4))
    check(Case("ag_gemm", 3, 5, 4))
    return answer


def test_different_shapes_are_reported_to_every_rank():
    for said, seconds in on_device(different_problems, 3, environment=SHORT):
        for rank in range(3):
            assert f"rank {rank}: ag_gemm M=18 N=15 K={4 + rank} nt float32 over 3 ranks" in said
        assert seconds < 2


def different_operations(rank: int) -> str:
    group = dist.group.WORLD
    op = GATHER if rank == 0 else SCATTER
    said, _ = seconds_until(errors.ProblemMismatch, lambda: op(tensor(6, 4), tensor(5, 4), group))
    check(Case("ag_gemm", 3, 5, 4))
    return said


def test_different_operations_are_reported_to_every_rank():
    for said in on_device(different_operations, 2, environment=SHORT):
        assert "rank 0: ag_gemm" in said
        assert "rank 1: gemm_rs" in said


def known_calls_in_another_order(rank: int, late: int) -> tuple[str, float]:
    group = dist.group.WORLD
    small, large = Case("ag_gemm", 6, 5, 4), Case("ag_gemm", 9, 5, 4)
    for case in (small, large):
        check(case)
    x = tensor(9 if rank == 1 else 6, 4)
    if rank == late:
        time.sleep(0.5)  # the others wait for its rows by now
    call = lambda: GATHER(x, tensor(5, 4), group)  # noqa: E731
    said, seconds = seconds_until(errors.ProblemMismatch, call)
    assert seconds_until(errors.ProblemMismatch, call)[1] < 1, "a later call does not wait either"
    return said, seconds


# on GPUs the whole device is waited for, which NCCL would hold
@pytest.mark.parametrize("strategy", STRATEGIES[GATHER][1:] if DEVICE == "cpu" else ["fused"])
@pytest.mark.parametrize("late", [0, 1])
def test_known_calls_in_another_order_are_reported_to_every_rank(late, strategy):
    environment = LONG | {"FLUX_MEGATRON_STRATEGY": strategy}
    answers = on_device(known_calls_in_another_order, RANKS, late, environment=environment)
    for rank, (said, seconds) in enumerate(answers):
        mine, theirs = (9, 6) if rank == 1 else (6, 9)
        others = [other for other in range(RANKS) if (other == 1) != (rank == 1)]
        assert f"of rank {rank} is ag_gemm M={mine * RANKS} N={5 * RANKS} K=4" in said
        seen = [f"of rank {other} ag_gemm M={theirs * RANKS} N={5 * RANKS}" for other in others]
        assert any(text in said for text in seen)
        assert seconds < SOON_S


def a_new_call_and_a_known_one(rank: int, late: int) -> tuple[str, float]:
    """Rank 1 asks about a problem while the others make a call that all have made before."""
    group = dist.group.WORLD
    check(Case("ag_gemm", 6, 5, 4))
    x, w = (tensor(9, 4), tensor(7, 4)) if rank == 1 else (tensor(6, 4), tensor(5, 4))
    if rank == late:
        time.sleep(0.5)
    return seconds_until(errors.ProblemMismatch, lambda: GATHER(x, w, group))


@pytest.mark.parametrize("late", [0, 1])
def test_a_new_call_beside_a_known_one_is_reported_to_every_rank(late):
    answers = on_device(a_new_call_and_a_known_one, RANKS, late, environment=FUSED | LONG)
    # by rank 1's question, or where another rank sees the difference first, by that rank's refusal
    asked = f"rank 1 asks: ag_gemm M={9 * RANKS} N={7 * RANKS} K=4"
    for said, seconds in answers:
        assert asked in said or "of rank 1 one that is new to it" in said
        assert f"ag_gemm M={6 * RANKS} N={5 * RANKS} K=4" in said, "what the others call"
        assert seconds < SOON_S


def one_refuses(rank: int, bad: dict, plan: Plan | None) -> tuple[str, float]:
    """Rank 1 brings what cannot work, the others a new problem."""
    group = dist.group.WORLD
    good = {"x": (6, 4), "w": (5, 4), "dtype": torch.float32, "layout": "nt"}
    given = good | (bad if rank == 1 else {})
    x, w = (tensor(*given[name], dtype=given["dtype"]) for name in ("x", "w"))
    plan = plan if rank == 1 else None
    expected = ValueError if rank == 1 else errors.ProblemMismatch
    answer = seconds_until(expected, lambda: GATHER(x, w, group, layout=given["layout"], plan=plan))
    check(Case("ag_gemm", 3, 5, 4))
    check(Case("gemm_rs", 3, 5, 4))
    return answer


@pytest.mark.parametrize(
    ("bad", "plan", "reason"),
    [
        ({"w": (5, 3)}, None, "equal K expected"),
        ({"dtype": torch.int32}, None, "one floating-point dtype expected"),
        ({"layout": "tn"}, None, "layout 'tn' given"),
        ({"dtype": torch.float64}, Plan("fused"), "cannot run: dtype float64"),
    ],
    ids=["shape", "dtype", "layout", "plan"],
)
def test_the_reason_of_a_refusal_is_reported_to_the_others(bad, plan, reason):
    answers = on_device(one_refuses, 3, bad, plan, environment=SHORT)
    for rank, (said, seconds) in enumerate(answers):
        assert reason in said
        assert seconds < 2
        if rank != 1:
            assert "rank 1: refused: " in said
            assert f"rank {rank}: ag_gemm M=18" in said


def one_refuses_what_is_known(rank: int) -> tuple[str, float]:
    """The others have asked about this problem before: only a signal is missing."""
    group = dist.group.WORLD
    x, w = tensor(6, 4), tensor(5, 4)
    GATHER(x, w, group)
    if rank == 1:
        time.sleep(0.5)
        with pytest.raises(ValueError, match="equal K"):
            GATHER(x[:, :3].contiguous(), w, group)
        dist.barrier()
        return "", 0.0
    answer = seconds_until(errors.ProblemMismatch, lambda: GATHER(x, w, group))
    dist.barrier()
    return answer


def test_a_missing_signal_is_explained_by_a_refusal():
    (said, seconds), _ = on_device(one_refuses_what_is_known, 2, environment=FUSED | LONG)
    assert "rank 1 refused: " in said
    assert "equal K expected" in said
    assert seconds < SOON_S


def one_never_comes(rank: int, known: bool, pattern: str) -> tuple[str, float]:
    group = dist.group.WORLD
    check(Case(pattern, 3, 5, 4))
    if rank == 2:
        time.sleep(4)
        return "", 0.0
    case = Case(pattern, 3, 5, 4 if known else 6)
    return seconds_until(
        errors.SignalTimeout if known else errors.ProblemMismatch, lambda: check(case, group)
    )


@pytest.mark.parametrize("pattern", ["ag_gemm", "gemm_rs"])
def test_a_rank_that_never_comes_is_named(pattern):
    *answers, _ = on_device(one_never_comes, 3, True, pattern, environment=SHORT | FUSED)
    for said, seconds in answers:
        assert "waited 2 s for communication tile 0 of rank 2: epoch 2 expected, 1 seen" in said
        assert 1.9 < seconds < 4


def test_a_rank_that_never_asks_is_named():
    *answers, _ = on_device(one_never_comes, 3, False, "ag_gemm", environment=SHORT)
    for said, seconds in answers:
        assert "rank 2: no answer" in said
        assert 1.9 < seconds < 4


def two_never_come(rank: int) -> float:
    """The time limit is one for all, not one for each missing rank."""
    check(Case("ag_gemm", 3, 5, 4))
    if rank:
        time.sleep(4)
        return 0.0
    said, seconds = seconds_until(errors.ProblemMismatch, lambda: check(Case("ag_gemm", 3, 5, 6)))
    assert "rank 1: no answer; rank 2: no answer" in said
    return seconds


def test_missing_ranks_share_one_time_limit():
    seconds, *_ = on_device(two_never_come, 3, environment=SHORT)
    assert 1.9 < seconds < 3.5


def begins_twice(rank: int) -> None:
    group = dist.group.WORLD
    x, w = tensor(6, 4), tensor(5, 4)
    first = ops.start_gemm_rs(x, w, group)
    with pytest.raises(errors.WorkspaceError, match="while another was open"):
        ops.start_gemm_rs(x, w, group)
    assert torch.equal(first.finish().cpu(), torch.full((3, 5), 8.0))
    gather = ops.start_gather(x, w, group)
    with pytest.raises(errors.WorkspaceError, match="while another was open"):
        GATHER(x, w, group)
    # the other direction is another channel
    assert torch.equal(SCATTER(x, w, group).cpu(), torch.full((3, 5), 8.0))
    assert torch.equal(gather.complete().cpu(), torch.ones(12, 4))
    gather.close()
    check(Case("ag_gemm", 3, 5, 4))


def test_a_second_call_while_one_is_open_is_refused():
    on_device(begins_twice, 2, environment=FUSED)


def biases_differ(rank: int) -> None:
    """Whether there is a bias is a rank's own affair: nothing is asked about it."""
    group = dist.group.WORLD
    x, w, bias = tensor(6, 4), tensor(5, 4), tensor(5)
    for given in (bias if rank else None, None):
        y = GATHER(x, w, group, bias=given)
        assert torch.equal(y.cpu(), torch.full((12, 5), 4.0 if given is None else 5.0))
    GATHER(tensor(2, 4), w, group)


def test_a_bias_on_some_ranks_only():
    on_device(biases_differ, 2, environment=SHORT)
