"""What a caller may give: wrappers, addresses, strides, dtypes of a bias, and no rows at all; and
derivatives of gradients (create_graph=True): those of one process, or one clear error.
"""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from closeness import assert_exact, small_integers
from layer_cases import Layer, apply, check, layer, mine
from ranks import FUSED, here, on_device_ranks
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.two_tensor import TwoTensor

import flux_megatron
from flux_megatron import ops
from flux_megatron.lab.reference import all_gather_gemm
from flux_megatron.nn import functions
from flux_megatron.nn.functions import column_parallel_linear, local_linear, row_linear
from flux_megatron.nn.norm import rms_norm
from flux_megatron.nn.replicated import sum_gradient
from flux_megatron.overlap import differentiable, operands
from flux_megatron.wgrad import Deferred, IntoMainGrad

STRATEGIES = ["fused", "pipelined", "sequential"]


def strange(w: Tensor) -> list[Tensor]:
    """w [N, K] at an odd address, as columns of a wider matrix, transposed, and negated twice."""
    N, K = w.shape
    odd = w.new_empty(N * K + 1)[1:].view(N, K).copy_(w)
    columns = w.new_empty(N, 2 * K)[:, K:].copy_(w)
    transposed = w.t().contiguous().t()
    negated = torch._neg_view(-w)
    return [odd, columns, transposed, negated]


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_device_ranks(2, environment={"FLUX_MEGATRON_STRATEGY": "{strategy}"})
def test_any_address_and_any_strides(rank):
    made = layer("column", dist.get_world_size(), torch.bfloat16, (4, 3), 8, 16, True)
    for index in range(4):
        x, w, bias = mine(made, rank, "")
        rows = strange(x.flatten(0, 1))[index].view(x.shape) if index != 2 else x
        assert_exact(apply(made, rows, strange(w)[index], bias), made.y[rank], f"case {index}")
    assert {reason[:11] for what, reason in flux_megatron.report().copies if what == "w"} == {
        "its address", "its rows ha",
    }  # fmt: skip
    gemv = flux_megatron.gemv_all_reduce
    x, w, _ = mine(layer("row", dist.get_world_size(), torch.float32, (4, 3), 8, 16, False), rank)
    x = x.detach().flatten(0, 1)
    whole = gemv(x, w.detach(), dist.group.WORLD)
    for one in strange(w.detach()):
        assert_exact(gemv(x, one, dist.group.WORLD), whole, "gemv")
    x = torch.ones(4, 8)
    assert operands.memory("x", x) is x, "aligned rows are not copied"
    assert operands.memory("x", x[:, :4], contiguous=False).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_device_ranks(2, environment={"FLUX_MEGATRON_STRATEGY": "{strategy}"})
def test_tensors_that_stand_for_others(rank):
    R, group = dist.get_world_size(), dist.group.WORLD
    made = layer("column", R, torch.float32, (4, 3), 8, 16, True)
    x, w, bias = mine(made, rank, "")
    parts = torch.cat(made.x).to(x.device) * (rank == 0)
    under_way = functional.reduce_scatter_tensor(parts, "sum", 0, group)
    assert_exact(apply(made, under_way, w, bias), made.y[rank], "AsyncCollectiveTensor")
    mesh = init_device_mesh(here().type, (R,))
    sharded = [DTensor.from_local(t, mesh, [Shard(0)]).requires_grad_() for t in (x, w, bias)]
    y = apply(made, *sharded)
    assert_exact(y, made.y[rank], "DTensor")
    y.backward(made.dy[rank].to(y.device))
    for tensor, expected in zip(sharded, (made.dx, made.dw, made.db), strict=True):
        assert isinstance(tensor.grad, DTensor)
        assert_exact(tensor.grad.to_local(), expected[rank], "gradient of a DTensor")
    with pytest.raises(ValueError, match=r"placements .*Replicate.* expected"):
        apply(made, DTensor.from_local(x, mesh, [Replicate()]), w, bias)
    with pytest.raises(ValueError, match=r"TwoTensor given, a torch.Tensor expected"):
        apply(made, TwoTensor(x, x.clone()), w, bias)
    assert_exact(apply(made, x, w, bias), made.y[rank], "after refusals")


@on_device_ranks(2, environment=FUSED)
def test_a_bias_of_another_dtype_is_added_as_torch_adds_it(rank):
    group = dist.group.WORLD
    given = small_integers((2, 4, 8), torch.bfloat16, torch.Generator().manual_seed(0))
    x, w = given[0].to(here()), given[1].to(here()).requires_grad_()
    bias = torch.full((4,), 0.5, device=here(), requires_grad=True)
    y = column_parallel_linear(x, w, bias, group=group)
    wanted = (all_gather_gemm([given[0]] * 2, [given[1]] * 2)[rank] + 0.5).float()
    assert_exact(y, wanted, "y")
    plain = flux_megatron.all_gather_gemm(x, w.detach(), group, bias=bias.detach())
    assert_exact(plain, wanted, "y of the operation")
    y.sum().backward()
    assert_exact(bias.grad, torch.full((4,), 8.0), "db")
    assert w.grad.dtype is torch.bfloat16


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [1, 2])
@on_device_ranks("world_size", environment={"FLUX_MEGATRON_STRATEGY": "{strategy}"})
def test_an_empty_micro_batch(rank):
    shapes = (0, 3, 16), (0, 3, 8), (8, 16), (8,)
    x, y, w, bias = ([torch.zeros(shape)] * dist.get_world_size() for shape in shapes)
    for kind in ("column", "row", "local"):
        given = None if kind == "row" else bias
        made = Layer(kind, torch.float32, x, w, given, y, y, x, w, bias)
        check(made, rank)
        check(made, rank, "x")
    x, w = (torch.ones(s, device=here(), requires_grad=True) for s in ((0, 3, 16), (8, 16)))
    group = dist.group.WORLD
    for operation in ops.OPERATIONS.values():
        assert operation(x.detach()[:, 0], w.detach(), group).shape == (0, 8)
    for y in (row_linear(x, w, group=group), local_linear(x, w, None, allreduce_group=group)):
        assert y.shape == (0, 3, 8)
        y.sum().backward()
        assert_exact(w.grad, torch.zeros(8, 16), "dw")
        assert x.grad.shape == x.shape
    assert flux_megatron.report().total == 0, "no rows, no call"


S, K, N = 8, 12, 16
column, row = functions.column_parallel_linear, functions.row_parallel_linear


def whole() -> list[Tensor]:
    """x [S, 2, K], the weights [N, K] and [K, N] of two layers, and that of a norm [K]."""
    generator = torch.Generator().manual_seed(0)
    shapes = (S, 2, K), (N, K), (K, N), (K,)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def penalty(
    y: Tensor, x: Tensor, gamma: Tensor, weights: list[Tensor], whole: Callable = lambda t: t
) -> Tensor:
    """What a gradient penalty minimizes. `whole` sums over all ranks what is of a rank's shards.
    Every rank has the whole gradient of gamma.
    """
    given = [x, gamma, *weights]
    dx, d_gamma, *dws = torch.autograd.grad(y.pow(2).sum(), given, create_graph=True)
    of_weights = whole(sum(dw.pow(2).sum() for dw in dws)) + d_gamma.pow(2).sum()
    return y.pow(2).sum() + dx.pow(2).sum() + 0.1 * of_weights


def expected() -> list[Tensor]:
    given = [tensor.requires_grad_() for tensor in whole()]
    x, first, second, gamma = given
    y = torch.tanh(torch.nn.functional.rms_norm(x, (K,), gamma, 1e-5) @ first.t()) @ second.t()
    return list(torch.autograd.grad(penalty(y, x, gamma, [first, second]), given))


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@on_device_ranks("world_size")
def test_second_derivatives_are_those_of_one_process(rank, sequence):
    R, group = dist.get_world_size(), dist.group.WORLD

    def local(x: Tensor, first: Tensor, second: Tensor, gamma: Tensor) -> list[Tensor]:
        mine = x.chunk(R)[rank] if sequence else x
        return [mine, first.chunk(R)[rank], second.chunk(R, 1)[rank].contiguous(), gamma]

    given = [one.to(here(), torch.float32).clone().requires_grad_() for one in local(*whole())]
    x, first, second, gamma = given
    # each rank has its rows' part of the gradient
    normed = rms_norm(x, sum_gradient(gamma, group=group) if sequence else gamma, eps=1e-5)
    if sequence:
        y = row(torch.tanh(column(normed, first, None, group=group)), second, group=group)
        loss = penalty(y, x, gamma, [first, second])
    else:
        inner = local_linear(normed, first, None, allreduce_group=group)
        y = row_linear(torch.tanh(inner), second, group=group)
        loss = penalty(y, x, gamma, [first, second], lambda t: differentiable.reduce(t, group))
    gradients = torch.autograd.grad(loss, given)
    for got, want in zip(gradients, local(*expected()), strict=True):
        torch.testing.assert_close(
            got.double().cpu(), want, rtol=1e-3, atol=1e-3 * want.abs().max()
        )
    assert any("create_graph" in reason for _, reason in flux_megatron.report().fallbacks)


@on_device_ranks(2)
def test_what_cannot_be_differentiated_again_is_an_error(rank):
    group = dist.group.WORLD
    x, w = (tensor.float().to(here()).requires_grad_() for tensor in whole()[:2])
    into = IntoMainGrad(torch.zeros_like(w))
    for make in (
        lambda: column(x, w, None, group=group, wgrad=into),
        lambda: column(x, w, None, group=group, wgrad=lambda w, dy, x: None),
        lambda: column(x, w, None, group=group, save_gathered=True),
        lambda: column(x, w, None, group=group, wgrad=Deferred(lambda w, dy: None)),
        lambda: row(x, w, group=group, wgrad=into),
        lambda: row_linear(x, w, group=group, wgrad=into),
    ):
        with pytest.raises(RuntimeError, match=r"create_graph=True given, .* leave wgrad .* and"):
            torch.autograd.grad(make().sum(), x, create_graph=True)
