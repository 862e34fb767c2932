"""The suite's two assertions distinguish right from wrong: a shard missing, a bias twice, a stale
tile.
"""

from __future__ import annotations

import pytest
import torch
from closeness import (
    assert_as_close_as,
    assert_exact,
    assert_sums_exact,
    small_integers,
)
from torch import Tensor

R, M_SHARD, N, K = 4, 24, 40, 32
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def operands(dtype: torch.dtype, exact: bool) -> tuple[list[Tensor], list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(5)

    def operand(*shape: int) -> Tensor:
        if exact:
            return small_integers(shape, dtype, generator)
        return torch.randn(shape, generator=generator).to(dtype)

    x = [operand(R * M_SHARD, K) for _ in range(R)]
    w = [operand(N, K) for _ in range(R)]
    return x, w, operand(N)


def wrong_answers(partials: list[Tensor], bias: Tensor) -> dict[str, Tensor]:
    total = torch.stack(partials).sum(0)
    stale = total.clone()
    stale[:16, :16] = partials[0][:16, :16] + partials[1][:16, :16]
    poisoned = total.clone()
    poisoned[3, 4] = float("nan")
    return {
        "one shard missing": torch.stack(partials[1:]).sum(0) + bias,
        "bias on every rank": total + R * bias,
        "one stale tile": stale + bias,
        "shards in another order": (total + bias).roll(M_SHARD, 0),
        "one NaN": poisoned + bias,
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_tells_right_from_wrong(dtype):
    x, w, bias = operands(dtype, exact=True)
    assert_sums_exact(torch.cat(x, 1), torch.cat(w, 1).t(), extra=1)
    partials = [a.double() @ b.double().t() for a, b in zip(x, w, strict=True)]
    expected = (torch.stack(partials).sum(0) + bias.double()).to(dtype)
    assert_exact(sum(partials).to(dtype) + bias, expected)
    for name, answer in wrong_answers(partials, bias.double()).items():
        with pytest.raises(AssertionError, match="elements differ"):
            assert_exact(answer.to(dtype), expected, name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_as_close_tells_right_from_wrong(dtype):
    x, w, bias = operands(dtype, exact=False)
    reference = sum(a.double() @ b.double().t() for a, b in zip(x, w, strict=True)) + bias.double()
    partials = [a @ b.t() for a, b in zip(x, w, strict=True)]
    baseline = sum(partials) + bias
    assert_as_close_as(baseline, baseline, reference)
    for name, answer in wrong_answers(partials, bias).items():
        with pytest.raises(AssertionError, match="error"):
            assert_as_close_as(answer, baseline, reference, name)


def test_exact_checks_shape_and_dtype():
    one = torch.ones(2, 3)
    with pytest.raises(AssertionError, match="shape"):
        assert_exact(one.view(3, 2), one)
    with pytest.raises(AssertionError, match="dtype"):
        assert_exact(one.bfloat16(), one)


def test_operands_that_are_not_exact_are_refused():
    x = torch.full((1, 300), 1.0, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="can sum to 300"):
        assert_sums_exact(x, x.t())
