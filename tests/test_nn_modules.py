"""Linear layers for plain PyTorch: exact against the unsharded `torch.nn.Linear`."""

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from closeness import assert_exact, assert_sums_exact, small_integers
from ranks import DEVICE, FUSED, on_device, on_device_ranks
from torch import Tensor, nn
from torch.distributed import checkpoint

from flux_megatron import errors
from flux_megatron import nn as package
from flux_megatron.nn import ColumnParallelLinear, RowParallelLinear, sharded_state_dict
from flux_megatron.nn.linear import ParallelLinear

TOKENS, BATCH, IN, OUT = 6, 2, 12, 18  # 1, 2 and 3 ranks divide all but the batch
LAYERS = [ColumnParallelLinear, RowParallelLinear]
CASES = [  # dtype, bias
    (torch.float32, True), (torch.float32, False), (torch.bfloat16, True), (torch.float16, False)
]  # fmt: skip


def integer_linear(bias: bool, dtype: torch.dtype, sizes: tuple[int, int] = (IN, OUT)) -> nn.Linear:
    """Unsharded, in fp64, with parameters that are integers in `dtype`."""
    generator = torch.Generator().manual_seed(0)
    whole = nn.Linear(*sizes, bias, dtype=torch.float64)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.copy_(small_integers(parameter.shape, dtype, generator))
    return whole


def shard(layer: ParallelLinear, name: str, whole: Tensor) -> Tensor:
    """This rank's shard of a parameter: output features of a column layer, else input features."""
    row = isinstance(layer, RowParallelLinear)
    if row and name == "bias":
        return whole
    dimension = 1 if row else 0
    size = whole.shape[dimension] // dist.get_world_size(layer.group)
    return whole.narrow(dimension, dist.get_rank(layer.group) * size, size)


def sharded(kind: type[ParallelLinear], whole: nn.Linear, **options) -> ParallelLinear:
    sizes = whole.in_features, whole.out_features
    layer = kind(*sizes, whole.bias is not None, device=DEVICE, **options)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(shard(layer, name, getattr(whole, name)))
    return layer


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Unsharded x and dy."""
    generator = torch.Generator().manual_seed(0)
    x = small_integers((TOKENS, BATCH, IN), dtype, generator)
    return x, small_integers((TOKENS, BATCH, OUT), dtype, generator)


def local(layer: ParallelLinear, whole: Tensor, which: str) -> Tensor:
    """This rank's shard of x or y: tokens outside of a pair of layers, features between."""
    outside = isinstance(layer, ColumnParallelLinear) == (which == "x")
    return whole.chunk(layer.world_size, 0 if outside else -1)[layer.rank]


def check(layer: ParallelLinear, whole: nn.Linear, dtype: torch.dtype, run=None) -> None:
    """Forward and backward of this rank, by `run` if given, beside those of the unsharded layer."""
    x, dy = operands(dtype)
    rows, grads = x.flatten(0, 1), dy.flatten(0, 1)
    for left, right in (
        (rows, whole.weight.t()), (grads, whole.weight), (grads.t(), rows), (grads.t(), grads)
    ):  # fmt: skip
        assert_sums_exact(left, right.detach().to(dtype), extra=1)
    expected_x = x.double().requires_grad_()
    whole.zero_grad()
    expected = whole(expected_x)
    expected.backward(dy.double())

    x_local = local(layer, x, "x").clone().to(DEVICE).requires_grad_()
    layer.zero_grad()
    y = layer(x_local) if run is None else run(x_local)
    what = f"{layer} {dtype}"
    assert_exact(y, local(layer, expected, "y").to(dtype), f"y of {what}")
    y.backward(local(layer, dy, "y").to(DEVICE))
    assert_exact(x_local.grad, local(layer, expected_x.grad, "x").to(dtype), f"dx of {what}")
    for name, parameter in layer.named_parameters():
        gradient = shard(layer, name, getattr(whole, name).grad).to(parameter.dtype)
        if parameter.requires_grad:
            assert_exact(parameter.grad, gradient, f"d{name} of {what}")
        else:
            assert parameter.grad is None, f"d{name} of {what}"


@pytest.mark.parametrize(("world_size", "strategy"), [(1, "auto"), (2, "fused"), (3, "sequential")])
@on_device_ranks("world_size", environment={"FLUX_MEGATRON_STRATEGY": "{strategy}"})
def test_exact_forward_and_backward(rank):
    for kind, (dtype, bias) in itertools.product(LAYERS, CASES):
        whole = integer_linear(bias, dtype)
        check(sharded(kind, whole, dtype=dtype), whole, dtype)


@pytest.mark.parametrize("world_size", [1, 2])
@on_device_ranks("world_size", environment=FUSED)
def test_parameters_that_all_ranks_hold_get_whole_gradients(rank):
    """Column into row, and a parameter that all ranks hold whole, each on its x_local tokens."""
    R = dist.get_world_size()
    up, down = integer_linear(False, torch.float64), integer_linear(True, torch.float64, (OUT, IN))
    x, _ = operands(torch.float64)
    scale = torch.arange(1.0, IN + 1, dtype=torch.float64).requires_grad_()
    expected = x + down(up(x * scale).relu())
    expected.sum().backward()

    column, row = sharded(ColumnParallelLinear, up), sharded(RowParallelLinear, down)
    own_scale = scale.detach().float().to(DEVICE).requires_grad_()
    x_local = x.chunk(R)[rank].float().to(DEVICE)
    y = x_local + row(column(x_local * package.sum_gradient(own_scale)).relu())
    assert_exact(y, expected.chunk(R)[rank].float())
    y.sum().backward()  # dy is one element, expanded
    assert_exact(own_scale.grad, scale.grad.float(), "the scale")
    assert_exact(row.bias.grad, down.bias.grad.float(), "the bias")
    for layer, whole in ((column, up), (row, down)):
        expected_grad = shard(layer, "weight", whole.weight.grad)
        assert_exact(layer.weight.grad, expected_grad.float(), str(layer))


@pytest.mark.parametrize("world_size", [1, 3])
@on_device_ranks("world_size")
def test_the_ranks_together_begin_as_one_linear_layer_does(rank):
    for kind, (dtype, bias) in itertools.product(LAYERS, CASES):
        options = {"device": DEVICE, "dtype": dtype}
        torch.manual_seed(5)
        whole = nn.Linear(IN, OUT, bias, **options)
        following = torch.rand(3, device=DEVICE)
        torch.manual_seed(5)
        layer = kind(IN, OUT, bias, **options)
        assert torch.equal(torch.rand(3, device=DEVICE), following), "random numbers stand alike"
        assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"][: 1 + bias]
        for name, parameter in layer.named_parameters():
            assert_exact(parameter, shard(layer, name, getattr(whole, name)), f"{name} of {layer}")
            assert parameter.is_contiguous()
        later = kind(IN, OUT, bias, device="meta", dtype=dtype).to_empty(device=DEVICE)
        torch.manual_seed(5)
        later.reset_parameters()
        assert torch.equal(later.weight, layer.weight)


@on_device_ranks(2)
def test_the_state_has_shards_and_is_gathered_as_whole_tensors(rank):
    R = dist.get_world_size()
    whole = integer_linear(True, torch.float32)
    model = nn.Sequential(*(sharded(kind, whole) for kind in LAYERS), nn.LayerNorm(3))
    shapes = {name: list(t.shape) for name, t in model.state_dict().items()}
    assert shapes == {
        "0.weight": [OUT // R, IN], "0.bias": [OUT // R], "1.weight": [OUT, IN // R],
        "1.bias": [OUT], "2.weight": [3], "2.bias": [3],
    }  # fmt: skip
    assert repr(model[1]) == (
        f"RowParallelLinear(in_features={IN}, out_features={OUT}, bias=True, rank={rank} of {R})"
    )
    copied = copy.deepcopy(model)
    assert copied[0].group is dist.group.WORLD
    gathered = sharded_state_dict(model)
    for name in ("0.weight", "0.bias", "1.weight", "1.bias"):
        values = getattr(whole, name[2:])
        assert_exact(gathered[name].full_tensor(), values.float(), name)
        assert gathered[name].to_local().data_ptr() == model.state_dict()[name].data_ptr()
    assert not hasattr(gathered["2.weight"], "full_tensor")
    assert sharded_state_dict(model[1]).keys() == {"weight", "bias"}


def save(rank: int, folder: str) -> None:
    layer = sharded(ColumnParallelLinear, integer_linear(True, torch.float32))
    checkpoint.save(sharded_state_dict(layer), checkpoint_id=folder)


def load(rank: int, folder: str) -> None:
    whole = integer_linear(True, torch.float32)
    layer = ColumnParallelLinear(IN, OUT, device=DEVICE)
    checkpoint.load(sharded_state_dict(layer), checkpoint_id=folder)
    for name, parameter in layer.named_parameters():
        assert_exact(parameter, shard(layer, name, getattr(whole, name)).float(), name)


def test_a_checkpoint_is_read_by_another_number_of_ranks(tmp_path):
    on_device(save, 2, str(tmp_path))
    on_device(load, 3, str(tmp_path))


def compiled(layer: Callable, backend: str = "aot_eager") -> Callable[[Tensor], Tensor]:
    torch._dynamo.reset()
    return torch.compile(layer, fullgraph=True, backend=backend)


@on_device_ranks(2, environment=FUSED)
def test_compile_sees_autocast_a_wrong_width_and_a_whole_parameter(rank):
    layer = sharded(RowParallelLinear, integer_linear(True, torch.bfloat16))
    x = local(layer, operands(torch.float32)[0], "x").to(DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert_exact(compiled(layer, "eager")(x), layer(x))
    with pytest.raises(ValueError, match="equal K expected"):
        compiled(layer, "eager")(x[..., 1:])
    scale = torch.ones(3, device=DEVICE, requires_grad=True)
    compiled(package.sum_gradient, "eager")(scale).sum().backward()
    assert_exact(scale.grad, torch.full((3,), 2.0), "the sum over 2 ranks")


@on_device_ranks(3)
def test_wrong_sizes_are_refused_on_every_rank(rank):
    for kind, split in zip(LAYERS, ("out_features", "in_features"), strict=True):
        sizes = {"in_features": 6, "out_features": 6}
        for wrong in (7, 0):
            said = rf"{kind.__name__}: {split} {wrong} given, a multiple of the group's 3 ranks"
            with pytest.raises(ValueError, match=said):
                kind(**{**sizes, split: wrong})
        layer = kind(**sizes, device=DEVICE)
        width = layer.in_features_local
        tokens = "tokens / R" if kind is ColumnParallelLinear else "tokens"
        for shape in ([3, 1, width + 1], [width]):
            with pytest.raises(ValueError, match="given") as caught:
                layer(torch.ones(shape, device=DEVICE))
            assert str(caught.value) == (
                f"{kind.__name__}: x {shape} given, [{tokens}, ..., {width}] expected"
            )
    with pytest.raises(ValueError, match=r"x \[4, 2\] given, a first dimension divisible"):
        layer(torch.ones(4, width, device=DEVICE))


@on_device_ranks(2, environment=FUSED)
def test_another_width_on_one_rank_is_reported_to_the_others(rank):
    layer = ColumnParallelLinear(4, 4, device=DEVICE)
    said = rf"x \[3, {4 + rank}\] given, \[tokens / R, ..., 4\] expected" if rank else "rank 1"
    with pytest.raises(errors.ProblemMismatch if rank == 0 else ValueError, match=said):
        layer(torch.ones(3, 4 + rank, device=DEVICE))


@on_device_ranks(3, environment=FUSED)
def test_a_group_of_some_ranks(rank):
    group = dist.new_group([0, 2])
    whole = integer_linear(True, torch.float32)
    for kind in LAYERS:
        if rank == 1:
            with pytest.raises(ValueError, match=f"{kind.__name__}: a group without rank 1 given"):
                kind(IN, OUT, group=group)
        else:
            layer = sharded(kind, whole, group=group)
            assert (layer.rank, layer.world_size) == (rank // 2, 2)
            check(layer, whole, torch.float32)


def test_the_names_are_loaded_when_they_are_used_and_need_a_process_group():
    with pytest.raises(ValueError, match="ColumnParallelLinear: no process group given"):
        ColumnParallelLinear(4, 4)
    assert {*package.__all__} == {*package._PLACES}
    assert all(hasattr(package, name) for name in package.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Linear'"):
        package.Linear  # noqa: B018
