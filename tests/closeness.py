"""How tests compare: exactly, on operands whose sums are exact; else by the error against fp64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# integers up to this magnitude are exact in a dtype, and so is every sum that stays below it
EXACT_LIMIT = {
    torch.bfloat16: 2**8,
    torch.float16: 2**11,
    torch.float32: 2**24,
    torch.float64: 2**53,
}


def small_integers(
    shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator, largest: int = 1,
    kept: float = 1.0,
) -> Tensor:  # fmt: skip
    """Integers from -largest to largest; those that are not among the share `kept` are 0."""
    drawn = {"size": tuple(shape), "generator": generator, "device": generator.device}
    integers = torch.randint(-largest, largest + 1, **drawn).to(dtype)
    if kept < 1.0:
        integers *= torch.rand(**drawn) < kept
    return integers


def assert_sums_exact(x: Tensor, w: Tensor, extra: int = 0) -> None:
    """No partial sum of x [M,K] @ w [K,N], in any order, leaves the exact integers of the dtype."""
    largest = (x.abs().double() @ w.abs().double()).max().item() + extra
    limit = EXACT_LIMIT[x.dtype]
    assert largest <= limit, f"these operands can sum to {largest}, {x.dtype} is exact to {limit}"


def assert_exact(got: Tensor, expected: Tensor, what: str = "") -> None:
    """Same shape, dtype and values, with no tolerance; NaN equals nothing."""
    got, expected = got.detach().cpu(), expected.detach().cpu()
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, expected {expected.shape}"
    assert got.dtype == expected.dtype, f"{what}: dtype {got.dtype}, expected {expected.dtype}"
    wrong = (got != expected).nonzero()
    if len(wrong):
        place = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{what}: {len(wrong)} of {got.numel()} elements differ, the first at {place}: "
            f"{got[place].item()}, expected {expected[place].item()}; "
            f"rows {wrong[:, 0].min()} to {wrong[:, 0].max()}"
        )


def largest_error(got: Tensor, reference: Tensor) -> float:
    """The largest difference from the fp64 reference; NaN if there is one."""
    return (got.detach().cpu().double() - reference).abs().max().item()


def assert_as_close_as(got: Tensor, baseline: Tensor, reference: Tensor, what: str = "") -> None:
    """The error of `got` against `reference` (fp64) is at most twice that of `baseline`."""
    assert got.shape == reference.shape, f"{what}: shape {got.shape}, expected {reference.shape}"
    assert got.dtype == baseline.dtype, f"{what}: dtype {got.dtype}, expected {baseline.dtype}"
    error, allowed = largest_error(got, reference), 2 * largest_error(baseline, reference)
    # not "error > allowed": NaN must fail
    assert error <= allowed, f"{what}: error {error:.3g}, at most {allowed:.3g} allowed"
