"""Where matrices of experts lie: found as one view or not at all, and read there by strategies."""

from __future__ import annotations

import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from closeness import assert_exact, small_integers
from ranks import DEVICE, on_device_ranks
from test_expert_parallel import PLANS, expected, gradients, idle_source, operands, passes, uneven
from test_signalled_experts import plan_of
from torch import Tensor

import flux_megatron
from flux_megatron.expert_parallel import ops, separate
from flux_megatron.expert_parallel.wgrad import add_weight_gradient
from flux_megatron.kernels.experts.weights import ExpertWeights, as_one
from flux_megatron.kernels.experts.wgrad import add_gradients, expert_wgrad

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
    found, one = as_one(given), as_one(given[:1])
    assert (found.pitch, found.first) == ((-rows, 2 * rows) if reverse else (rows, 0))
    assert len(found.rows()) == 2 * rows + N
    for expert, matrix in enumerate(given):
        assert found.of(expert).data_ptr() == matrix.data_ptr()
        assert_exact(found.rows()[found.first + expert * found.pitch :][:N], matrix)
    assert (one.matrices.shape, one.pitch, one.first) == ((1, N, K), N, 0)


def of_other_storages() -> list[Tensor]:
    """Neighbours, as an allocator gives them: the first one's storage ends before the second."""
    memory = torch.zeros(E, N, K)
    size = N * K * memory.itemsize
    return [torch.frombuffer(memory.numpy().data.cast("B")[e * size : (e + 1) * size],
                             dtype=memory.dtype).view(N, K) for e in range(E)]  # fmt: skip


ROWS, APART = torch.zeros(N + E, K), apart(N, False)
NOT_ONE_VIEW = {
    "swapped": [APART[e] for e in (0, 2, 1)],
    "part of a row": [*torch.zeros(E, N * K + 2)[:, :-2].unflatten(1, (N, K))],
    "overlapping": [ROWS[e : e + N] for e in range(E)],
    "transposed": [matrix.t() for matrix in torch.zeros(E, K, N)],
    "of other storages": of_other_storages(),
}


@pytest.mark.parametrize("given", NOT_ONE_VIEW.values(), ids=NOT_ONE_VIEW)
def test_all_else_is_none(given):
    assert as_one(given) is None


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
        w, v = (laid(one[rank].to(DEVICE), reverse) for one in (given.w, given.v))
        w.requires_grad_(), v.requires_grad_()
        options = {"layout": layout, "plan": plan, "reverse": reverse}
        hidden, y, dx, _ = passes(rank, given, w, v, **options)
        dw, dv = (one.grad.flip(0) if reverse else one.grad for one in (w, v))
        for got, right in zip((hidden, y, dx, dw, dv), expected(given, layout), strict=True):
            assert_exact(got, right[rank], f"{name} {layout}")


@on_device_ranks(2)
def test_other_strides_are_refused_by_all_ranks(rank):
    x, counts = torch.ones(6, 4, device=DEVICE), torch.ones(2, 3, dtype=torch.int32, device=DEVICE)
    w = torch.ones(3, 4, 8, device=DEVICE).transpose(1, 2)
    with pytest.raises(ValueError, match="whole rows apart"):
        ops.a2a_gemm(x, w, counts, dist.group.WORLD, capacity=16)


@pytest.mark.parametrize(("scattered", "frozen"), [(False, False), (True, False), (False, True)])
@on_device_ranks(2)
def test_parameters_that_lie_apart_are_not_copied(rank, scattered, frozen):
    """As autograd sees one parameter an expert; others are copied, which is said once. Those of the
    first expert may be frozen.
    """
    group = dist.group.WORLD
    given = operands(idle_source, group.size(), 3, 8, 16, torch.float32, "nt", spare=0)
    w, v = ([*laid(one[rank].to(DEVICE), True)][::-1] for one in (given.w, given.v))
    if scattered:
        w, v = ([one.clone() for one in some] for some in (w, v))
    flux_megatron.reset_report()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            for one in (*w[frozen:], *v[frozen:]):
                one.requires_grad_().grad = None
            *got, _ = passes(rank, given, w, v, separate)
    *right, dw, dv = expected(given, "nt")
    for one, of_all in zip(got, right, strict=True):
        assert_exact(one, of_all[rank])
    for one, gradient in zip([*w, *v], [*dw[rank], *dv[rank]], strict=True):
        assert (one.grad is not None) == one.requires_grad
        if one.requires_grad:
            assert_exact(one.grad, gradient)
    x, counts = given.x[rank].to(DEVICE), given.counts[rank].to(DEVICE)
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
    wanted = "weights of experts are copied: 3 of [8, 16] do not lie one distance apart"
    assert not scattered or wanted in texts[0]


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
@pytest.mark.parametrize("by_kernel", [False, True, "made before"])
def test_gradients_are_added_where_they_lie(reverse, by_kernel):
    sizes = (5, 0, 33)
    made = torch.Generator().manual_seed(0)
    a, b = (small_integers((sum(sizes) + 9, n), torch.bfloat16, made).to(DEVICE) for n in (20, 70))
    right = gradients(a, b, sizes)
    view = laid(torch.full((3, 20, 70), 2.0, device=DEVICE), reverse)
    into = ExpertWeights(view, reverse)
    received = torch.tensor([[5, 0, 3], [0, 0, 30]], dtype=torch.int32, device=DEVICE)
    if by_kernel == "made before":
        add_gradients(into, right)
    elif by_kernel:
        expert_wgrad(a, b, received.sum(0).cumsum(0).to(torch.int32), into)
    else:
        add_weight_gradient(into, a, b, received)
    for expert in range(3):
        assert_exact(into.of(expert), right[expert] + 2)
    assert into.rows().isnan().sum() == 2 * 2 * 70, "what lies between stays"
