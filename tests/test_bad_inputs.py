"""Calls that cannot work: every rank gets the reason, none hangs, and the next call works."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from cases import Case, assert_refused, check
from ranks import DEVICE, FUSED, on_device_ranks
from torch.testing._internal.two_tensor import TwoTensor

import flux_megatron
from flux_megatron import errors, ops, pieces, settings
from flux_megatron.nn.functions import column_parallel_linear, row_parallel_linear
from flux_megatron.problem import Plan
from flux_megatron.symm import workspaces

SHORT = {"FLUX_MEGATRON_TIMEOUT_S": "2"}
RANKS = 3 if DEVICE == "cpu" else 2  # of which rank 1 makes another call than the others
LONG = {"FLUX_MEGATRON_TIMEOUT_S": "8"}  # what a wait that nobody ends would take
SOON_S = 4.0
GATHER, SCATTER = BOTH = ops.all_gather_gemm, ops.gemm_reduce_scatter
STRATEGIES = ["low_latency", "hopper", "fused", "pipelined", "signalled", "sequential"]


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=DEVICE)


def text(*shape: int, dtype: str = "float32", device: str = DEVICE) -> str:
    device = f"{device}:{torch.cuda.current_device()}" if device == "cuda" else device
    return f"{list(shape)} {dtype} on {device}"


@on_device_ranks(2)
def test_every_rank_gets_the_error_and_the_group_still_works(rank):
    for pattern in ("ag_gemm", "gemm_rs"):
        check(Case(pattern, 3, 5, 4))
    x, w, integers = tensor(6, 4), tensor(5, 4), tensor(6, 4, dtype=torch.int32)
    for op in BOTH:  # the shapes of most bad calls: what was checked is known by now
        op(x, w, dist.group.WORLD)
    GATHER(x, w, dist.group.WORLD, bias=tensor(5))
    divisible, bias = "divisible by the group's 2 ranks expected", "[5] torch.float32 expected"
    assert_refused([
        ([SCATTER], (tensor(7, 4), w), {}, f"x {text(7, 4)} given", divisible),
        ([row_parallel_linear], (tensor(3, 2, 4), w), {}, "x [3, 2, 4] given", divisible),
        ([GATHER], (x, w), {"bias": tensor(4)}, f"bias {text(4)} given", bias),
        ([GATHER], (x, w), {"bias": tensor(5, dtype=torch.int32)},
         f"bias {text(5, dtype='int32')} given", bias),
        ([column_parallel_linear], (tensor(3, 2, 6), w, None), {},
         f"x {text(6, 6)} and w {text(5, 4)} given", "equal K expected for layout 'nt'"),
        (BOTH, (integers, w.int()), {}, "int32", "one floating-point dtype"),
        (BOTH, (x, w.half()), {},
         f"x {text(6, 4)} and w {text(5, 4, dtype='float16')} given", "one floating"),
        (BOTH, (tensor(6, 3), w), {}, f"x {text(6, 3)} and w {text(5, 4)} given", "equal K"),
        (BOTH, (x, w), {"layout": "nn"}, "equal K expected for layout 'nn'"),
        (BOTH, (tensor(4), w), {}, f"x {text(4)}", "two matrices expected"),
        (BOTH, (tensor(2, 3, 4), w), {}, "two matrices expected"),
        (BOTH, (tensor(0, 3), w), {}, "equal K expected"),
        (BOTH, (x, tensor(0, 4)), {}, "no empty dimension expected"),
        (BOTH, (x, w.to_sparse()), {},
         "w with the layout torch.sparse_coo given, a dense tensor expected"),
        (BOTH, (TwoTensor(x, x), w), {},
         "x of the type torch.testing._internal.two_tensor.TwoTensor given"),
        (BOTH, (x, w), {"layout": "tn"}, "layout 'tn' given, one of ('nt', 'nn') expected"),
        (BOTH, (x, w), {"plan": Plan("magic")}, "strategy 'magic' given",
         f"one of {STRATEGIES} expected"),
        (BOTH, (x.double(), w.double()), {"plan": Plan("fused")}, "cannot run",
         "dtype float64 is none of float32, bfloat16, float16"),
    ])  # fmt: skip
    for pattern in ("ag_gemm", "gemm_rs"):
        check(Case(pattern, 3, 5, 4))
        check(Case(pattern, 7, 2, 3))


@pytest.mark.skipif(DEVICE == "cuda", reason="GPU ranks serve other tests, with these settings")
@on_device_ranks(2)
def test_new_settings_count_for_calls_that_are_known(rank):
    for wanted in ("fused", "pipelined", "fused", "sequential"):
        os.environ["FLUX_MEGATRON_STRATEGY"] = wanted
        settings.reload()
        flux_megatron.reset_report()
        check(Case("gemm_rs", 3, 5, 4))
        assert [strategy for _, strategy in flux_megatron.report().calls] == [wanted]


@on_device_ranks(2)
def test_another_device_is_refused(rank):
    check(Case("ag_gemm", 3, 5, 4))
    x, w = tensor(6, 4), tensor(5, 4)
    GATHER(x, w, dist.group.WORLD)  # calls of these shapes are known
    run = [partial(ops.run_ag_gemm, bias=None)]
    assert_refused([
        (run, (x.to("meta"), w.to("meta")), {},
         "[6, 4] float32 on meta given", "where the group's first call was"),
        (run, (x, w.to("meta")), {}, "[5, 4] float32 on meta given, one device expected"),
    ])  # fmt: skip
    check(Case("ag_gemm", 3, 5, 6))


@on_device_ranks(2)
def test_rows_that_a_known_layer_kind_cannot_have_are_refused(rank):
    for rows in (6, 8):
        SCATTER(tensor(rows, 4), tensor(5, 4), dist.group.WORLD)
    checked = workspaces.workspaces()[0].checked.values()
    assert {one.problem.M for one in checked} == {6, 8}
    divisible = "divisible by the group's 2 ranks expected"
    assert_refused([([SCATTER], (tensor(7, 4), tensor(5, 4)), {}, "x [7, 4] float32", divisible)])
    check(Case("gemm_rs", 3, 5, 4))


@pytest.mark.skipif(DEVICE == "cuda", reason="GPU ranks serve other tests, with these settings")
@on_device_ranks(1)
def test_a_layer_kind_is_known_under_the_settings_that_it_was_met_with(rank):
    for beside in ("0", "1"):
        os.environ["FLUX_MEGATRON_BESIDE"] = beside
        settings.reload()
        for rows in (4, 6):
            GATHER(tensor(rows, 4), tensor(5, 4), dist.group.WORLD)
        checked = workspaces.workspaces()[0].checked.values()
        assert {one.problem.beside for one in checked} == {beside == "1"}


def completed(call: Callable) -> None:
    call()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    workspaces.check()


def seconds_until(error: type[Exception], call: Callable) -> tuple[str, float]:
    """What an error says that ends a call, and when."""
    started = time.monotonic()
    with pytest.raises(error) as caught:
        completed(call)
    return str(caught.value), time.monotonic() - started


@on_device_ranks(3, environment=SHORT)
def test_different_shapes_are_reported_to_every_rank(rank):
    check(Case("gemm_rs", 3, 5, 4))
    x, w = tensor(6, 4 + rank), tensor(5, 4 + rank)
    said, seconds = seconds_until(errors.ProblemMismatch, lambda: GATHER(x, w, dist.group.WORLD))
    for other in range(3):
        assert f"rank {other}: ag_gemm M=18 N=15 K={4 + other} nt float32 over 3 ranks" in said
    assert seconds < 2
    check(Case("gemm_rs", 3, 5, 4))
    check(Case("ag_gemm", 3, 5, 4))


BY = [(0, "fused"), (1, "fused")]  # rank 0 or 1 is late
if DEVICE == "cpu":  # on GPUs the whole device is waited for, which NCCL would hold
    BY += [(0, "pipelined"), (1, "signalled"), (0, "sequential")]


@pytest.mark.parametrize(("late", "strategy"), BY)
@on_device_ranks(RANKS, environment=LONG | {"FLUX_MEGATRON_STRATEGY": "{strategy}"})
def test_known_calls_in_another_order_are_reported_to_every_rank(rank, late):
    mine, theirs = (9, 6) if rank == 1 else (6, 9)
    for rows in (6, 9):
        check(Case("ag_gemm", rows, 5, 4))
    x, w = tensor(mine, 4), tensor(5, 4)
    if rank == late:
        time.sleep(0.5)  # the others wait for its rows by now
    call = partial(GATHER, x, w, dist.group.WORLD)
    said, seconds = seconds_until(errors.ProblemMismatch, call)
    assert seconds_until(errors.ProblemMismatch, call)[1] < 1, "a later call does not wait either"
    assert f"of rank {rank} is ag_gemm M={mine * RANKS} N={5 * RANKS} K=4" in said
    others = [other for other in range(RANKS) if (other == 1) != (rank == 1)]
    seen = [f"of rank {other} ag_gemm M={theirs * RANKS} N={5 * RANKS}" for other in others]
    assert any(text in said for text in seen)
    assert seconds < SOON_S


@pytest.mark.parametrize("late", [0, 1])
@on_device_ranks(RANKS, environment=FUSED | LONG)
def test_a_new_call_beside_a_known_one_is_reported_to_every_rank(rank, late):
    """Rank 1 asks about a problem while the others make a call that all have made before."""
    check(Case("ag_gemm", 6, 5, 4))
    x, w = (tensor(9, 4), tensor(7, 4)) if rank == 1 else (tensor(6, 4), tensor(5, 4))
    if rank == late:
        time.sleep(0.5)
    said, seconds = seconds_until(errors.ProblemMismatch, lambda: GATHER(x, w, dist.group.WORLD))
    # by rank 1's question, or where another rank sees the difference first, by that rank's refusal
    asked = f"rank 1 asks: ag_gemm M={9 * RANKS} N={7 * RANKS} K=4"
    assert asked in said or "of rank 1 one that is new to it" in said
    assert f"ag_gemm M={6 * RANKS} N={5 * RANKS} K=4" in said, "what the others call"
    assert seconds < SOON_S


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"w": (5, 3)}, "equal K expected"),
        ({"dtype": torch.int32}, "one floating-point dtype expected"),
        ({"layout": "tn"}, "layout 'tn' given"),
        ({"dtype": torch.float64, "plan": Plan("fused")}, "cannot run: dtype float64"),
        ({"bias": torch.ones(5).to_sparse()}, "bias with the layout torch.sparse_coo given"),
    ],
    ids=["shape", "dtype", "layout", "plan", "bias"],
)
@on_device_ranks(3, environment=SHORT)
def test_the_reason_of_a_refusal_is_reported_to_the_others(rank, bad, reason):
    """Rank 1 brings what cannot work, the others a new problem."""

    def call(w=(5, 4), dtype=torch.float32, **options) -> None:
        x, w = tensor(6, 4, dtype=dtype), tensor(*w, dtype=dtype)
        GATHER(x, w, dist.group.WORLD, **options)

    error = ValueError if rank == 1 else errors.ProblemMismatch
    said, seconds = seconds_until(error, partial(call, **bad if rank == 1 else {}))
    assert reason in said
    assert seconds < 2
    if rank != 1:
        assert "rank 1: refused: " in said
        assert f"rank {rank}: ag_gemm M=18" in said
    check(Case("ag_gemm", 3, 5, 4))
    check(Case("gemm_rs", 3, 5, 4))


@on_device_ranks(2, environment=FUSED | LONG)
def test_a_missing_signal_is_explained_by_a_refusal(rank):
    """Rank 0 has asked about this problem before: only a signal is missing."""
    x, w = tensor(6, 4), tensor(5, 4)
    call = partial(GATHER, x, w, dist.group.WORLD)
    call()
    if rank == 1:
        time.sleep(0.5)
        with pytest.raises(ValueError, match="equal K"):
            GATHER(x[:, :3].contiguous(), w, dist.group.WORLD)
    else:
        said, seconds = seconds_until(errors.ProblemMismatch, call)
        assert "rank 1 refused: " in said
        assert "equal K expected" in said
        assert seconds < SOON_S
    dist.barrier()


@on_device_ranks(3, environment=SHORT)
def test_ranks_that_never_ask_are_named_within_one_time_limit(rank):
    check(Case("ag_gemm", 3, 5, 4))
    if rank:
        time.sleep(4)
        return
    said, seconds = seconds_until(errors.ProblemMismatch, lambda: check(Case("ag_gemm", 3, 5, 6)))
    assert "rank 1: no answer; rank 2: no answer" in said
    assert 1.9 < seconds < 3.5


@on_device_ranks(2, environment=FUSED)
def test_a_second_call_while_one_is_open_is_refused(rank):
    group = dist.group.WORLD
    x, w = tensor(6, 4), tensor(5, 4)
    first = pieces.start_gemm_rs(x, w, group)
    with pytest.raises(errors.WorkspaceError, match="while another was open"):
        pieces.start_gemm_rs(x, w, group)
    assert torch.equal(first.finish().cpu(), torch.full((3, 5), 8.0))
    gather = pieces.start_gather(x, w, group)
    with pytest.raises(errors.WorkspaceError, match="while another was open"):
        GATHER(x, w, group)
    # the other direction is another channel
    assert torch.equal(SCATTER(x, w, group).cpu(), torch.full((3, 5), 8.0))
    assert torch.equal(gather.complete().cpu(), torch.ones(12, 4))
    gather.close()
    check(Case("ag_gemm", 3, 5, 4))


@on_device_ranks(2, environment=SHORT)
def test_a_bias_on_some_ranks_only(rank):
    """Whether there is a bias is a rank's own affair: nothing is asked about it."""
    group = dist.group.WORLD
    x, w, bias = tensor(6, 4), tensor(5, 4), tensor(5)
    for given in (bias if rank else None, None):
        y = GATHER(x, w, group, bias=given)
        assert torch.equal(y.cpu(), torch.full((12, 5), 4.0 if given is None else 5.0))
    GATHER(tensor(2, 4), w, group)
