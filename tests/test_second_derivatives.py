"""Derivatives of gradients (create_graph=True): those of one process, or one clear error."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import here, on_device_ranks
from torch import Tensor

import flux_megatron
from flux_megatron.nn import functions
from flux_megatron.nn.functions import local_linear, row_linear
from flux_megatron.nn.norm import rms_norm
from flux_megatron.nn.replicated import sum_gradient
from flux_megatron.overlap import differentiable
from flux_megatron.wgrad import IntoMainGrad

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
        lambda: column(x, w, None, group=group, save_gathered=True),
        lambda: column(x, w, None, group=group, dy_buffer=[]),
        lambda: row(x, w, group=group, wgrad=into),
        lambda: row_linear(x, w, group=group, wgrad=into),
    ):
        with pytest.raises(RuntimeError, match="create_graph=True given, but weight gradients"):
            torch.autograd.grad(make().sum(), x, create_graph=True)
