"""The patterns: a GEMM y[M, N] = x[M, K] @ w, and the communication among R ranks around it.

Each pattern has one description. Code that chooses, measures, predicts or checks reads it and names
no pattern. Only functions that compute a pattern name it: in `ops`, in the strategies, in the
layers.

| pattern | x on each rank | w on each rank ("nt") | y on each rank |
| --- | --- | --- | --- |
| ag_gemm | [M / R, K] | [N / R, K] | [M, N / R] |
| gemm_rs | [M, K / R] | [N, K / R] | [M / R, N] |
| gemm_ar | [M, K / R] | [N, K / R] | [M, N], the same on all |
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class PatternSpec:
    """`gathers`: each rank has a shard of the rows of x, needs all of them, and computes columns of
    y. `reduces`: K is divided, and y is a sum over the ranks. `scatters`: each rank gets a shard of
    the rows of y.

    `dual` is the name of dgrad's pattern: it scatters what this one gathers, and the reverse. "" if
    dgrad needs no communication.
    """

    dual: str = ""
    gathers: bool = False
    reduces: bool = False
    scatters: bool = False

    @property
    def divided(self) -> bool:
        """Whether the rows of x or y are: under sequence parallelism."""
        return self.gathers or self.scatters


class Pattern(str, Enum):
    """Its value is its name in rows, plans and settings."""

    AG_GEMM = "ag_gemm"
    GEMM_RS = "gemm_rs"
    GEMM_AR = "gemm_ar"

    def __str__(self) -> str:
        return self.value

    @property
    def spec(self) -> PatternSpec:
        return _SPECS[self]

    @property
    def dual(self) -> Pattern:
        """The pattern of dgrad; `ValueError` where that needs no communication."""
        return Pattern(self.spec.dual)


_SPECS = {
    Pattern.AG_GEMM: PatternSpec("gemm_rs", gathers=True),
    Pattern.GEMM_RS: PatternSpec("ag_gemm", reduces=True, scatters=True),
    Pattern.GEMM_AR: PatternSpec(reduces=True),
}

# the forward of Megatron's layers under sequence parallelism
COLUMN, ROW = Pattern.AG_GEMM, Pattern.GEMM_RS
