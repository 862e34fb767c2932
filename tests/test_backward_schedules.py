"""What backward does when: plans, a frozen rank, late or custom wgrad, all-reduced rows."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from closeness import assert_exact
from layer_cases import apply, layer, mine, transfers
from ranks import DEVICE, FUSED, here, on_device_ranks
from torch import Tensor

import flux_megatron
from flux_megatron import errors, pieces
from flux_megatron.lab import reference
from flux_megatron.nn.functions import local_linear, row_linear
from flux_megatron.overlap import calls, registry
from flux_megatron.problem import Pattern
from flux_megatron.symm.program import CallProgram
from flux_megatron.symm.workspaces import workspace
from flux_megatron.tuning import choice
from flux_megatron.wgrad import Deferred, accumulate_wgrad_by_torch

STRATEGIES = ["fused", "pipelined", "sequential"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@on_device_ranks(2)
def test_the_plan_of_dgrad_says_how_x_is_gathered_before_it(rank):
    """What a column layer's backward starts where its forward and its dgrad have two strategies."""
    started: list[str] = []

    class Watched(calls.InFlight):
        def __init__(self, program: CallProgram, x: Tensor, w: Tensor | None, *given: object):
            started.append(f"{'gather' if w is None else 'scatter'} {program.plan.strategy}")
            super().__init__(program, x, w, *given)

    calls.InFlight = Watched
    for gathers, scatters in itertools.permutations(["sequential", "fused", "pipelined"], 2):
        space = workspace(dist.group.WORLD, here())
        space.checked.clear()
        names = {Pattern.AG_GEMM: gathers, Pattern.GEMM_RS: scatters}
        choice.choose = lambda problem, table, space, names=names: (
            registry.strategy(problem, names[problem.pattern]).default_plan(problem), None
        )  # fmt: skip
        made = layer("column", 2, torch.float32, (5, 3), 7, 9, False)
        given = mine(made, rank)
        y = apply(made, *given)
        started.clear()
        y.backward(made.dy[rank].to(DEVICE))
        gathering = "sequential" if scatters == "sequential" else "pipelined"  # by copy engines
        expected = [f"gather {gathering}", f"scatter {scatters}"]
        assert started == expected, (gathers, scatters)
        assert_exact(given[0].grad, made.dx[rank], scatters)
        assert_exact(given[1].grad, made.dw[rank], scatters)


@on_device_ranks(2, environment=FUSED | {"FLUX_MEGATRON_TIMEOUT_S": "2"})
def test_a_gather_on_one_rank_only_is_reported(rank):
    made = layer("column", 2, torch.float32, (5, 3), 7, 9, False)
    y = apply(made, *mine(made, rank, "xw" if rank else "x"))
    dist.barrier()

    def backward_and_another() -> None:
        y.backward(made.dy[rank].to(DEVICE))
        if DEVICE == "cuda":
            torch.cuda.synchronize()  # by then the kernel's wait has run out of time
        apply(made, *mine(made, rank, ""))

    # both new calls, and the growth of a channel, ask first; any rank may find it
    said = "call 6 of rank (1 is gather beside gemm_rs|0 is one that is new to it, of rank 1)"
    with pytest.raises((errors.ProblemMismatch, errors.SignalTimeout), match=said):
        backward_and_another()


@on_device_ranks(2, environment=FUSED)
def test_custom_wgrad(rank):
    """A wgrad that accumulates elsewhere sees all rows and leaves the weight without gradient."""
    R = dist.get_world_size()
    gathered = {"save_gathered": True}
    for kind, options in (("column", {}), ("column", gathered), ("row", {}), ("local", {})):
        made = layer(kind, R, torch.float32, (5, 3), 7, 9, False)
        x, w, bias = mine(made, rank)
        main_grad = torch.ones_like(w)

        def accumulate(weight: Tensor, dy: Tensor, x: Tensor, w=w, main_grad=main_grad) -> None:
            assert weight.data_ptr() == w.data_ptr()
            accumulate_wgrad_by_torch(main_grad, dy, x)

        y = apply(made, x, w, bias, wgrad=accumulate, **options)
        for times in (1, 2):
            y.backward(made.dy[rank].to(DEVICE), retain_graph=True)
            assert_exact(main_grad, times * made.dw[rank] + 1, f"{kind}, {times} times")
        assert w.grad is None
        assert_exact(x.grad, 2 * made.dx[rank], kind)


def deferred_into(buffer: list[Tensor]) -> Deferred:
    return Deferred(lambda w, dy: buffer.append(dy))


@on_device_ranks(2, environment=FUSED)
def test_deferred_wgrad(rank):
    """Backward hands dy over, in order, and does nothing else for the weight."""
    R = dist.get_world_size()
    for kind in ("column", "local"):
        made = layer(kind, R, torch.float32, (5, 3), 7, 9, True)
        buffer: list[Tensor] = []
        x, w, bias = mine(made, rank)
        y = apply(made, x, w, bias, wgrad=deferred_into(buffer))
        assert buffer == []
        y.backward(made.dy[rank].to(DEVICE))
        (dy,) = buffer
        assert_exact(dy.view(made.dy[rank].shape), made.dy[rank], kind)
        assert w.grad is None
        assert_exact(x.grad, made.dx[rank], kind)
        assert_exact(bias.grad, made.db[rank], kind)
        y = apply(made, *mine(made, rank), wgrad=deferred_into([]))
        assert y.grad_fn.saved_tensors[0] is None
        y = apply(made, *mine(made, rank, "x"), wgrad=deferred_into(buffer))
        y.backward(made.dy[rank].to(DEVICE))
        assert len(buffer) == 1
    made = layer("column", R, torch.float32, (5, 3), 7, 9, False)

    def forward_and_backward() -> None:
        y = apply(made, *mine(made, rank), wgrad=deferred_into([]), save_gathered=True)
        y.backward(made.dy[rank].to(DEVICE))

    assert transfers(forward_and_backward) == (1, 1)


@pytest.mark.parametrize(
    ("strategy", "world_size", "rows"),
    [
        ("fused", 1, 3),
        *itertools.product([*STRATEGIES, "low_latency"], (2, 3), (3,)),
        ("fused", 3, 5),
    ],
)
@on_device_ranks("world_size", environment={"FLUX_MEGATRON_STRATEGY": "{strategy}"})
def test_layers_of_whole_tokens(rank, strategy, rows):
    """Column and row layer without sequence parallelism; some rows cannot be shared."""
    group = dist.group.WORLD
    for dtype in DTYPES:
        made = layer("local", group.size(), dtype, (rows, 4), 7, 9, True)
        x, w, bias = mine(made, rank)
        y = local_linear(x, w, bias, allreduce_group=group)
        assert_exact(y, made.y[rank])
        y.backward(made.dy[rank].to(DEVICE))
        assert_exact(x.grad, torch.stack(made.dx).sum(0))
        assert_exact(w.grad, made.dw[rank])
        assert_exact(bias.grad, made.db[rank])
        x, w, _ = mine(made, rank)
        y = row_linear(x, w, group=group)
        partials = [reference.matmul(*one).to(dtype) for one in zip(made.x, made.w, strict=True)]
        assert_exact(y, torch.stack(partials).sum(0))
        y.backward(made.dy[rank].to(DEVICE))  # its own on each rank: dx and dw sum nothing
        assert_exact(x.grad, made.dx[rank])
        assert_exact(w.grad, made.dw[rank])
    report = flux_megatron.report()
    ran = strategy if group.size() > 1 and rows == 3 else "sequential"
    assert report.calls == {("gemm_ar", ran): 2 * len(DTYPES)}
    reasons = [] if rows == 3 else ["20 rows cannot be divided over 3 ranks"]
    assert [reason for _, reason in report.fallbacks] == reasons


@on_device_ranks(2)
def test_wgrad_hides_the_all_reduce(rank):
    group = dist.group.WORLD
    made = layer("local", group.size(), torch.float32, (3, 4), 7, 9, False)
    x, w, _ = mine(made, rank)
    order: list[str] = []
    start = pieces.start_gemm_ar

    def noted(*given, **options):
        order.append("start")
        reduction = start(*given, **options)
        return SimpleNamespace(finish=lambda: (order.append("finish"), reduction.finish())[1])

    def wgrad(w: Tensor, dy: Tensor, x: Tensor) -> Tensor:
        order.append("wgrad")
        return dy.t() @ x

    pieces.start_gemm_ar = noted
    y = local_linear(x, w, None, allreduce_group=group, wgrad=wgrad)
    y.backward(made.dy[rank].to(DEVICE))
    assert order == ["start", "wgrad", "finish"]
