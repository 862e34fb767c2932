"""Where matrices of experts lie: found as one view or not at all, and read there by strategies."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from closeness import assert_exact, small_integers
from ranks import DEVICE, on_device_ranks
from test_expert_parallel import PLANS, expected, idle_source, leaves, operands, uneven
from test_signalled_experts import plan_of
from torch import Tensor

import flux_megatron
from flux_megatron.expert_parallel import ops, separate
from flux_megatron.expert_parallel.wgrad import add_weight_gradient
from flux_megatron.kernels.expert_weights import ExpertWeights, as_one
from flux_megatron.kernels.expert_wgrad import expert_wgrad

E, N, K = 3, 4, 8


def apart(rows: int, reverse: bool, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """E matrices, `rows` rows apart, of one storage that begins with other things; NaN between."""
    storage = torch.full((2 + 2 * E * rows, K), float("nan"), dtype=dtype)
    found = [storage[2 + e * rows :][:N].copy_(torch.full((N, K), e)) for e in range(E)]
    return found[::-1] if reverse else found


@pytest.mark.parametrize("rows", [N, N + 3])
@pytest.mark.parametrize("reverse", [False, True])
def test_one_distance_is_one_view(rows, reverse):
    given = apart(rows, reverse)
    found = as_one(given)
    assert (found.pitch, found.first) == ((-rows, 2 * rows) if reverse else (rows, 0))
    assert len(found.rows()) == 2 * rows + N
    for expert, matrix in enumerate(given):
        assert found.of(expert).data_ptr() == matrix.data_ptr()
        assert_exact(found.rows()[found.first + expert * found.pitch :][:N], matrix)


def test_one_expert_is_one_view():
    found = as_one(apart(N, False)[:1])
    assert (found.matrices.shape, found.pitch, found.first) == ((1, N, K), N, 0)


def swapped() -> list[Tensor]:
    first, second, third = apart(N, False)
    return [first, third, second]


def part_of_a_row() -> list[Tensor]:
    storage = torch.zeros(E * (N * K + 2))
    return [storage[e * (N * K + 2) :][: N * K].view(N, K) for e in range(E)]


def overlapping() -> list[Tensor]:
    return [torch.zeros(N + E, K)[e : e + N] for e in range(E)]


def transposed() -> list[Tensor]:
    return [matrix.t() for matrix in torch.zeros(E, K, N)]


def of_other_storages() -> list[Tensor]:
    """Neighbours, as an allocator gives them: the first one's storage ends before the second."""
    memory = torch.zeros(E, N, K)
    size = N * K * memory.itemsize
    return [torch.frombuffer(memory.numpy().data.cast("B")[e * size : (e + 1) * size],
                             dtype=memory.dtype).view(N, K) for e in range(E)]  # fmt: skip


@pytest.mark.parametrize(
    "made", [swapped, part_of_a_row, overlapping, transposed, of_other_storages]
)
def test_all_else_is_none(made: Callable[[], list[Tensor]]):
    assert as_one(made()) is None


def laid(w: Tensor, reverse: bool) -> Tensor:
    """[E, N, K] with NaN between the matrices, the first expert's last with `reverse`."""
    rows, columns = w.shape[1:]
    storage = w.new_full((len(w), rows + 2, columns), float("nan"))
    view = storage[:, :rows]
    return view.copy_(w.flip(0) if reverse else w)


@pytest.mark.parametrize(
    ("name", "reverse"),
    [("sequential", True), ("small tiles", False), ("TMA", True), ("signalled", True)],
)
@on_device_ranks(2)
def test_strategies_read_matrices_where_they_lie(rank, name, reverse):
    """Both operations and their backward with matrices that lie apart."""
    group = dist.group.WORLD
    plan = plan_of(2, tma=True) if name == "signalled" else PLANS[name]
    for layout in ("nt", "nn"):
        given = operands(uneven, group.size(), 3, 20, 24, torch.float32, layout, spare=3)
        counts = given.counts[rank].to(DEVICE)
        x = leaves([given.x[rank].to(DEVICE)])[0]
        w, v = (laid(one[rank].to(DEVICE), reverse) for one in (given.w, given.v))
        w.requires_grad_(), v.requires_grad_()
        options = {"layout": layout, "plan": plan, "reverse": reverse}
        hidden, _ = ops.a2a_gemm(x, w, counts, group, capacity=given.capacity, **options)
        y = ops.gemm_a2a(hidden, v, counts, group, tokens=len(x), **options)
        y.backward(given.dy[rank].to(DEVICE))
        dw, dv = (one.grad.flip(0) if reverse else one.grad for one in (w, v))
        for got, right in zip((hidden, y, x.grad, dw, dv), expected(given, layout), strict=True):
            assert_exact(got, right[rank], f"{name} {layout}")


@on_device_ranks(2)
def test_other_strides_are_refused_by_all_ranks(rank):
    x, counts = torch.ones(6, 4, device=DEVICE), torch.ones(2, 3, dtype=torch.int32, device=DEVICE)
    w = torch.ones(3, 4, 8, device=DEVICE).transpose(1, 2)
    with pytest.raises(ValueError, match="whole rows apart"):
        ops.a2a_gemm(x, w, counts, dist.group.WORLD, capacity=16)


@pytest.mark.parametrize("scattered", [False, True])
@on_device_ranks(2)
def test_parameters_that_lie_apart_are_not_copied(rank, scattered):
    """As autograd sees one parameter an expert; others are copied, which is said once."""
    group = dist.group.WORLD
    given = operands(idle_source, group.size(), 3, 8, 16, torch.float32, "nt", spare=0)
    counts = given.counts[rank].to(DEVICE)
    x = leaves([given.x[rank].to(DEVICE)])[0]
    w, v = ([*laid(one[rank].to(DEVICE), True)][::-1] for one in (given.w, given.v))
    if scattered:
        w, v = ([one.clone() for one in some] for some in (w, v))
    for one in (*w, *v):
        one.requires_grad_()
    flux_megatron.reset_report()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            hidden, _ = separate.a2a_gemm(x, w, counts, group, capacity=given.capacity)
            y = separate.gemm_a2a(hidden, v, counts, group, tokens=len(x))
    y.backward(given.dy[rank].to(DEVICE))
    got = (hidden, y, x.grad, *(torch.stack([one.grad for one in some]) for some in (w, v)))
    for one, right in zip(got, expected(given, "nt"), strict=True):
        assert_exact(one, right[rank])
    with torch.no_grad():
        kept = mock.Mock(wraps=ops._a2a_gemm)
        with mock.patch.object(ops, "_a2a_gemm", kept):
            separate.a2a_gemm(x, w, counts, group, capacity=given.capacity)
        assert kept.call_args.args[7] is False, "rows are kept though nothing is differentiated"
    copies = flux_megatron.report().copies
    assert [*copies.values()] == ([3, 2] if scattered else []), "all calls are counted"
    texts = [str(one.message) for one in said if "copied" in str(one.message)]
    assert bool(texts) == scattered
    assert len(texts) == len(set(texts))
    if scattered:
        assert (
            "weights of experts are copied: 3 of [8, 16] do not lie one distance apart" in texts[0]
        )


@on_device_ranks(2)
def test_one_expert_of_several_is_frozen(rank):
    """The first of each linear; the others learn as before."""
    group = dist.group.WORLD
    given = operands(idle_source, group.size(), 3, 8, 16, torch.float32, "nt", spare=0)
    counts = given.counts[rank].to(DEVICE)
    x = leaves([given.x[rank].to(DEVICE)])[0]
    w, v = ([*one[rank].to(DEVICE)] for one in (given.w, given.v))
    for _, *others in (w, v):
        for one in others:
            one.requires_grad_()
    hidden, _ = separate.a2a_gemm(x, w, counts, group, capacity=given.capacity)
    y = separate.gemm_a2a(hidden, v, counts, group, tokens=len(x))
    y.backward(given.dy[rank].to(DEVICE))
    *_, dx, dw, dv = (right[rank] for right in expected(given, "nt"))
    assert_exact(x.grad, dx)
    for (first, *others), right in ((w, dw), (v, dv)):
        assert first.grad is None
        for one, gradient in zip(others, right[1:], strict=True):
            assert_exact(one.grad, gradient)


@pytest.mark.parametrize("into", [None, torch.bfloat16, torch.float32])
def test_gradients_over_rows_of_all_ranks_are_rounded_once(into):
    """Four sources of 64 rows, of which one counts: 256 + 1 + 1 + 1 is 260 in bf16."""
    a, b = torch.zeros(256, 20), torch.ones(256, 24)
    a[::64] = torch.tensor([256.0, 1.0, 1.0, 1.0])[:, None]
    a, b = (one.to(DEVICE, torch.bfloat16) for one in (a, b))
    ends = torch.tensor([256], dtype=torch.int32, device=DEVICE)
    if into is None:
        assert_exact(expert_wgrad(a, b, ends), torch.full((1, 20, 24), 260, dtype=torch.bfloat16))
        return
    view = ExpertWeights(torch.zeros(1, 20, 24, dtype=into, device=DEVICE))
    expert_wgrad(a, b, ends, view)
    assert_exact(view.matrices, torch.full((1, 20, 24), 259.0).to(into))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("by_kernel", [False, True])
def test_gradients_are_added_where_they_lie(reverse, by_kernel):
    sizes = (5, 0, 33)
    made = torch.Generator().manual_seed(0)
    a, b = (small_integers((sum(sizes) + 9, n), torch.bfloat16, made).to(DEVICE) for n in (20, 70))
    pieces = (t[: sum(sizes)].float().split(sizes) for t in (a, b))
    right = torch.stack([x.t() @ y for x, y in zip(*pieces, strict=True)])
    view = laid(torch.full((3, 20, 70), 2.0, device=DEVICE), reverse)
    into = ExpertWeights(view, reverse)
    received = torch.tensor([[5, 0, 3], [0, 0, 30]], dtype=torch.int32, device=DEVICE)
    if by_kernel:
        expert_wgrad(a, b, received.sum(0).cumsum(0).to(torch.int32), into)
    else:
        add_weight_gradient(into, a, b, received)
    for expert in range(3):
        assert_exact(into.of(expert), right[expert] + 2)
    assert into.rows().isnan().sum() == 2 * 2 * 70, "what lies between stays"
