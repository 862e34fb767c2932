"""Activations and probabilities of experts beside torch's, against fp64; interpreted on CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from closeness import assert_as_close_as, largest_error
from ranks import DEVICE
from torch import Tensor

from flux_megatron.expert_parallel import activation

CAPACITY = 12
# rows from each of 2 ranks for each of 3 experts
COUNTS = {
    "some": [[1, 0, 3], [2, 1, 0]],
    "none": [[0, 0, 0], [0, 0, 0]],
    "all": [[4, 0, 2], [1, 2, 3]],
    "too many": [[9, 0, 2], [1, 2, 30]],
}
ACTIVATIONS = [F.silu, F.gelu]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# GPUs take exp(x) as 2^(x log2(e)): some roundings of fp32, which fp32 alone can show
FAST_EXP = 8 * 2**-23


@pytest.fixture(autouse=True)
def _kernels_on_any_device(monkeypatch):
    monkeypatch.setattr(activation, "INTERPRET", True)


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    random = torch.Generator().manual_seed(shape[-1])
    return (3 * torch.randn(*shape, generator=random)).to(DEVICE, dtype)


def gradients(function, leaves: list[Tensor], dy: Tensor) -> list[Tensor]:
    """y and the gradients of the leaves."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def by_torch(function, leaves: list[Tensor], dy: Tensor) -> list[Tensor]:
    """In the dtype of the leaves: `supports_tensors` takes no fp64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activation, "_by_kernel", lambda *given: False)
        return gradients(function, leaves, dy)


def check(function, leaves: list[Tensor], dy: Tensor, rows: int) -> None:
    got = gradients(function, leaves, dy)
    theirs = by_torch(function, leaves, dy)
    true = by_torch(function, [leaf.double().cpu() for leaf in leaves], dy.double().cpu())
    for ours, torch_s, exact in zip(got, theirs, true, strict=True):
        assert ours.dtype == torch_s.dtype
        if rows and not largest_error(ours[:rows], exact[:rows]) <= FAST_EXP * exact.abs().max():
            assert_as_close_as(ours[:rows], torch_s[:rows], exact[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("function", ACTIVATIONS, ids=["silu", "gelu"])
def test_gated_activation_of_the_rows_that_came(function, counts, dtype):
    received = torch.tensor(COUNTS[counts], dtype=torch.int32, device=DEVICE)
    x, dy = draw(CAPACITY, 48, dtype=dtype), draw(CAPACITY, 24, dtype=dtype)
    rows = min(int(received.sum()), CAPACITY)
    check(lambda leaf: activation.gated(leaf, received.to(leaf.device), function), [x], dy, rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N", [24, 5000])
@pytest.mark.parametrize("function", ACTIVATIONS, ids=["silu", "gelu"])
def test_gated_activation_times_weights(function, N, dtype):
    received = torch.tensor([[2, 3]], dtype=torch.int32, device=DEVICE)
    x, dy = draw(7, 2 * N, dtype=dtype), draw(7, N, dtype=dtype)
    weights = draw(7, dtype=torch.float32)

    def weighted(x: Tensor, weights: Tensor) -> Tensor:
        return activation.gated(x, received.to(x.device), function, weights)

    check(weighted, [x, weights], dy, 5)


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


BIASED = {  # as gpt-oss has it: two counts of ranks, an expert without rows, the last with some
    "some": [[1, 0, 3], [2, 0, 1]],
    "none": [[0, 0, 0], [0, 0, 0]],
    "one": [[0, 0, 4], [0, 0, 8]],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", BIASED)
@pytest.mark.parametrize("weighted", [False, True])
def test_gated_activation_with_a_bias_clamped_and_with_an_offset(
    weighted, counts, dtype, monkeypatch
):
    monkeypatch.setitem(activation.NAMES, quick_gelu, "quick_gelu")
    received = torch.tensor(BIASED[counts], dtype=torch.int32, device=DEVICE)
    rows = int(received.sum())
    x, dy = draw(CAPACITY, 48, dtype=dtype), draw(CAPACITY, 24, dtype=dtype)
    bias, weights = draw(3, 48, dtype=dtype), draw(CAPACITY, dtype=torch.float32)
    leaves = [x, bias, weights][: 2 + weighted]

    def of(x: Tensor, bias: Tensor, weights: Tensor | None = None) -> Tensor:
        counted = received.to(x.device)
        return activation.gated(x, counted, quick_gelu, weights, bias, clamp=2.0, offset=1.0)

    check(of, leaves, dy, rows)
    _, dx, dbias, *_ = gradients(of, leaves, dy)
    assert (dx[:rows] == 0).any() == bool(rows), "some values are clamped"
    assert dbias.any(1).tolist() == received.sum(0).bool().tolist()


def test_nothing_is_written_behind_the_rows_that_came(monkeypatch):
    poison = lambda original: lambda *a, **k: original(*a, **k).fill_(7.0)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    received = torch.tensor(COUNTS["some"], dtype=torch.int32, device=DEVICE)
    x, dy = draw(CAPACITY, 48, dtype=torch.float32), draw(CAPACITY, 24, dtype=torch.float32)
    y, dx = gradients(lambda leaf: activation.gated(leaf, received, F.silu), [x], dy)
    assert (y[7:] == 7.0).all()
    assert (dx[7:] == 7.0).all()
    assert (y[:7] != 7.0).all()


def test_rows_wider_than_a_block():
    received = torch.tensor([[1, 1]], dtype=torch.int32, device=DEVICE)
    x, dy = draw(3, 2 * 5000, dtype=torch.float32), draw(3, 5000, dtype=torch.float32)
    check(lambda leaf: activation.gated(leaf, received.to(leaf.device), F.silu), [x], dy, 2)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 8), (1, 8), (300, 24), (3, 5000)], ids=str)
def test_rows_times_probabilities(shape, dtype, scale_dtype):
    x, dy = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype) + 1
    scale = draw(shape[0], dtype=scale_dtype) if shape[0] else draw(1, dtype=scale_dtype)[:0]
    check(activation.scaled, [x, scale], dy, shape[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(12, 24), (5, 5000)], ids=str)
def test_rows_and_their_bias_times_probabilities(shape, dtype):
    counts = torch.tensor([2, 0, shape[0] - 2, 0], dtype=torch.int32, device=DEVICE)
    x, dy = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype) + 1
    scale, bias = draw(shape[0], dtype=torch.float32), draw(4, shape[1], dtype=dtype)

    def of(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        return activation.scaled(x, scale, bias, counts.to(x.device))

    check(of, [x, scale, bias], dy, shape[0])


def test_biases_of_other_activations_are_torch_s():
    received = torch.tensor([[1, 2], [0, 1]], dtype=torch.int32, device=DEVICE)
    x, dy = draw(4, 16, dtype=torch.float32), draw(4, 16, dtype=torch.float32)
    bias = draw(2, 16, dtype=torch.float32)

    def ours(x: Tensor, bias: Tensor) -> Tensor:
        return activation.biased(x, bias, received)

    def expected(x: Tensor, bias: Tensor) -> Tensor:
        return x + bias[[0, 1, 1, 1]]

    torch.testing.assert_close(gradients(ours, [x, bias], dy), gradients(expected, [x, bias], dy))
    x = draw(5, 16, dtype=torch.float32)  # one more than came
    y = activation.gated(x, received, torch.relu, bias=bias)
    gate, linear = (x[:4] + bias[[0, 1, 1, 1]]).chunk(2, -1)
    assert torch.equal(y[:4], torch.relu(gate) * linear)


def test_other_activations_are_torch_s(monkeypatch):
    monkeypatch.setattr(activation, "_Gated", None)
    x = draw(4, 16, dtype=torch.float32)
    received = torch.tensor([[1]], dtype=torch.int32, device=DEVICE)
    gate, linear = x.chunk(2, -1)
    assert torch.equal(activation.gated(x, received, torch.relu), torch.relu(gate) * linear)
