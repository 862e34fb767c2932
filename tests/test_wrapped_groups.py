"""A group is whatever answers `rank`, `size` and collectives: wrapped, renewed, without a name."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from closeness import assert_exact
from ranks import DEVICE, FUSED, here, on_cpu_ranks, on_device_ranks
from torch import Tensor
from torch.distributed import ProcessGroup
from wrapped_groups import MAKE, Configured, Hidden, Reloadable, listed, unlisted

import flux_megatron
from flux_megatron import ops, settings
from flux_megatron.expert_parallel import separate
from flux_megatron.nn import ColumnParallelLinear, RowParallelLinear, functions, sum_gradient
from flux_megatron.symm import groups, objects
from flux_megatron.symm.workspace import Workspace
from flux_megatron.symm.workspaces import workspaces


def layers(group: ProcessGroup) -> list[torch.nn.Module]:
    torch.manual_seed(0)
    return [ColumnParallelLinear(6, 8, group=group, device=DEVICE),
            RowParallelLinear(8, 6, group=group, device=DEVICE)]  # fmt: skip


def trained(column: torch.nn.Module, row: torch.nn.Module, tokens: int) -> list[Tensor]:
    """y and gradients of both layers, of integers."""
    for one in (column, row):
        one.zero_grad()
        for parameter in one.parameters():
            parameter.data.copy_(torch.arange(parameter.numel()).view(parameter.shape) % 5 - 2)
    x = (torch.arange(tokens * 6.0, device=DEVICE).view(tokens, 6) % 3).requires_grad_()
    y = row(column(x * sum_gradient(torch.ones(6, device=DEVICE), group=column.group)))
    y.sum().backward()
    return [y, x.grad, *(p.grad for one in (column, row) for p in one.parameters())]


def same(got: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert_exact(one, other, "")


@pytest.mark.parametrize("kind", MAKE)
@on_device_ranks(2, environment=FUSED)
def test_calls_of_any_group_are_right_and_share_one_workspace(rank, kind):
    group = MAKE[kind]()
    stock, ours = layers(dist.group.WORLD), layers(group)
    for one in ours:
        one.rank = rank  # a framework's class may say 0
    expected = [trained(*stock, tokens) for tokens in (2, 4, 8)]
    assert groups.group_named(groups.name_of(group)) is group
    with mock.patch.object(
        Workspace, "__init__", autospec=True, side_effect=Workspace.__init__
    ) as made:
        for tokens, right in zip((2, 4, 8), expected, strict=True):
            same(trained(*ours, tokens), right)
            x, w = torch.ones(2, 4, device=DEVICE), torch.ones(3, 4, device=DEVICE)
            assert_exact(ops.all_gather_gemm(x, w, group), torch.full((4, 3), 4.0), kind)
            assert_exact(ops.gemm_all_reduce(x, w, group), torch.full((2, 3), 8.0), kind)
            counts = torch.ones(2, 1, dtype=torch.int32, device=DEVICE)
            y, _ = separate.a2a_gemm(x, [w], counts, group, capacity=2)
            y = separate.gemm_a2a(y, [w.t().contiguous()], counts, group, tokens=2)
            assert_exact(y, torch.full((2, 4), 12.0), kind)
    assert made.call_count == 1
    assert flux_megatron.report().fallbacks == {}
    flux_megatron.release(group)
    assert [space.group for space in workspaces()] == [dist.group.WORLD]
    same(trained(*ours, 8), expected[-1])


@pytest.mark.parametrize("kind", ["reloadable", "configured", "named"])
@on_device_ranks(2, environment=FUSED)
def test_what_is_made_anew_inside_a_group_gets_memory_anew(rank, kind):
    group = MAKE[kind]()
    column, row = layers(group)
    column.rank = row.rank = rank
    expected = trained(column, row, 4)
    name = groups.name_of(group)
    for release in (False, True, False):
        (before,) = workspaces()
        assert before.group is group.group
        agreed = before.agreed.copy()
        group.destroy()
        if release:
            flux_megatron.release(group)
            assert workspaces() == []
        group.reload()
        same(trained(column, row, 4), expected)
        (now,) = workspaces()
        assert {*map(id, now.agreed.values())} == {*map(id, agreed.values())} != set()
        assert now.group is group.group is not before.group
        assert (before.size_bytes, before.channels) == (0, {})
        assert groups.name_of(group) == name
        del before, now


@pytest.mark.parametrize("kind", ["reloadable", "configured"])
@on_device_ranks(2, environment=FUSED)
def test_two_groups_that_are_renewed_know_their_plans(rank, kind):
    """The first call of one gives back the memory of both that torch's groups inside had."""
    both = [MAKE[kind](), MAKE[kind]()]
    x, w = torch.ones(2, 4, device=DEVICE), torch.ones(3, 4, device=DEVICE)

    def agreed() -> list[object]:
        for one in both:
            ops.all_gather_gemm(x, w, one)
        spaces = workspaces()
        assert [space.group for space in spaces] == [one.group for one in both]
        return [table for space in spaces for table in space.agreed.values()]

    before = agreed()
    for one in both:
        one.destroy()
    for one in both:
        one.reload()
    assert [*map(id, agreed())] == [*map(id, before)]


@on_device_ranks(2)
def test_ranks_agree_through_the_store_of_their_group(rank):
    group = unlisted()
    with mock.patch.object(dist.distributed_c10d, "_get_default_store", side_effect=AssertionError):
        ops.all_gather_gemm(torch.ones(2, 4, device=DEVICE), torch.ones(3, 4, device=DEVICE), group)


@on_cpu_ranks(2, environment=FUSED)
def test_a_compiled_layer_of_a_wrapped_group(rank):
    group = Reloadable(listed)
    column, row = layers(group)
    expected = trained(column, row, 4)
    one, other = (
        torch.compile(layer, fullgraph=True, backend="aot_eager") for layer in (column, row)
    )
    same(trained(one, other, 4), expected)
    group.destroy()
    group.reload()
    same(trained(one, other, 4), expected)


@on_cpu_ranks(2)
def test_what_a_class_without_a_backend_holds_is_inside(rank):
    inside = listed()
    wrapped = Reloadable(lambda: inside)
    assert groups.unwrapped(Configured(lambda: wrapped)) is inside
    wrapped.again = inside
    assert groups.unwrapped(wrapped) is inside
    wrapped.world = dist.group.WORLD
    assert groups.unwrapped(wrapped) is wrapped  # which of the two?
    alone = [dist.new_group([one]) for one in range(2)][rank]
    wrapped = Reloadable(lambda: alone)
    wrapped.group = dist.group.WORLD
    wrapped.size = lambda: 1
    assert groups.unwrapped(wrapped) is wrapped  # another group than it stands for


@on_cpu_ranks(2)
def test_time_and_devices_are_those_of_what_is_inside(rank):
    del os.environ["FLUX_MEGATRON_TIMEOUT_S"]
    settings.reload()
    assert groups.timeout_s(Reloadable(listed)) == 32.0
    assert groups.timeout_s(Configured(unlisted)) == 32.0
    inside = ProcessGroup(dist.HashStore(), 0, 1)
    backend = listed()._get_backend(here())
    inside._register_backend(torch.device("cuda"), ProcessGroup.BackendType.GLOO, backend)
    assert objects._device(Reloadable(lambda: inside)).type == "cuda"
    hidden = Hidden()
    for name, device in (("nccl", "cuda"), ("gloo", "cpu"), ("undefined", "cpu")):
        hidden.name = lambda name=name: name
        assert objects._device(hidden).type == device


def test_what_is_no_group_is_named():
    with pytest.raises(TypeError, match=r"release: group 'x' given, a .*ProcessGroup, or None"):
        flux_megatron.release("x")


@pytest.mark.parametrize("given", ["x", -100])  # torch gives the latter to ranks outside
def test_an_operation_names_what_is_no_group(given):
    x, w = torch.ones(2, 4), torch.ones(3, 4)
    expected = f"group {given!r} given, a torch.distributed.ProcessGroup with this rank expected"
    with pytest.raises(TypeError, match=expected):
        ops.all_gather_gemm(x, w, given)
    with pytest.raises(TypeError, match=expected):
        functions.row_linear(x, w, group=given)
