"""Published operation-level results beside what the model predicts for the same operations.

Nothing is fitted to them: they test how far constants from 4 x H200 carry. The operations are the
FLUX paper's (arXiv 2406.06858, operation level, TP 8 within a node): all-gather and GEMM of
(n, k) = (49152, 12288), GEMM and reduce-scatter of (12288, 49152), m = 1024 to 8192, bf16. Its
released code (bytedance/flux, README of 1.1) gives times for m = 4096 in fp16.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from flux_megatron.lab.perf.hardware import A100, A100_PCIE, H800, Hardware
from flux_megatron.lab.perf.linear import Linear, Platform, operator_us
from flux_megatron.lab.perf.operator_cost import collective_us, gemms_us, moved_bytes
from flux_megatron.problem import Problem


class Range(NamedTuple):
    low: float
    high: float


class Published(NamedTuple):
    """Ranges over m and both operations: E of FLUX and of TransformerEngine, and their ratio."""

    cluster: str
    hardware: Hardware
    flux: Range
    te: Range
    flux_over_te: Range


PUBLISHED = (
    Published("A100 PCIe", A100_PCIE, Range(0.41, 0.57), Range(-1.25, 0.36), Range(1.20, 3.25)),
    Published("A100 NVLink", A100, Range(0.36, 0.96), Range(-0.99, 0.74), Range(1.01, 1.33)),
    Published("H800 NVLink", H800, Range(0.37, 0.93), Range(-0.40, 0.80), Range(1.10, 1.51)),
)
MS = (1024, 2048, 4096, 8192)


class Kernel(NamedTuple):
    """Microseconds: torch's GEMM, what NCCL adds to it, and FLUX's kernel."""

    gpu: str
    hardware: Hardware
    column: bool
    gemm_us: int
    nccl_us: int
    flux_us: int


# an A100 whose NVLink has 400 of 600 GB/s
_A800 = replace(
    A100,
    **{name: getattr(A100, name) * 2 / 3 for name in ("copy_gbps", "nccl_gbps", "store_gbps")},
)
KERNELS = (
    Kernel("A800", _A800, True, 2438, 662, 2469),
    Kernel("A800", _A800, False, 2453, 646, 2508),
    Kernel("H800", H800, True, 846, 583, 957),
    Kernel("H800", H800, False, 818, 590, 932),
)


def _problem(column: bool, m: int) -> Problem:
    n, k = (49152, 12288) if column else (12288, 49152)
    return Linear(column, m, n, k, tp=8).forward


def problems() -> list[Problem]:
    return [_problem(column, m) for column in (True, False) for m in MS]


def efficiency(problem: Problem, strategy: str, hardware: Hardware) -> float:
    """E: 1 where communication is free, 0 where it costs what NCCL costs after the GEMM."""
    gemm = sum(gemms_us(problem, hardware))
    serial = collective_us(hardware, moved_bytes(problem), problem.world_size)
    return 1 - (operator_us(problem, strategy, Platform(hardware)) - gemm) / serial


def predicted(one: Published) -> tuple[Range, Range, Range]:
    """E of ours, E of TransformerEngine, and ours over it."""
    platform = Platform(one.hardware)
    ours, te = (
        [efficiency(problem, strategy, one.hardware) for problem in problems()]
        for strategy in ("auto", "te")
    )
    ratios = [
        operator_us(problem, "te", platform) / operator_us(problem, "auto", platform)
        for problem in problems()
    ]
    return _range(ours), _range(te), _range(ratios)


def _range(values: list[float]) -> Range:
    return Range(min(values), max(values))


def table() -> str:
    """Markdown: the paper's ranges, and ours."""
    lines = [
        "| cluster | E of FLUX, paper | E of ours, predicted | E of TE, paper | predicted "
        "| FLUX over TE, paper | ours over TE, predicted |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in PUBLISHED:
        ours, te, ratio = predicted(one)
        shares = [one.flux, ours, one.te, te]
        cells = [f"{low:.0%} .. {high:.0%}" for low, high in shares]
        cells += [f"{low:.2f} .. {high:.2f}" for low, high in (one.flux_over_te, ratio)]
        lines.append(f"| {one.cluster} | {' | '.join(cells)} |")
    return "\n".join(lines)


def kernels_table() -> str:
    """Markdown: published and predicted times, in microseconds."""
    lines = [
        "| GPU | operation | GEMM, published | predicted | NCCL, published | predicted "
        "| FLUX, published | ours, predicted |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in KERNELS:
        problem = _problem(one.column, 4096)
        gemm = sum(gemms_us(problem, one.hardware))
        nccl = collective_us(one.hardware, moved_bytes(problem), problem.world_size)
        ours = operator_us(problem, "auto", Platform(one.hardware))
        lines.append(
            f"| {one.gpu} | {problem.pattern} | {one.gemm_us} | {gemm:.0f} | {one.nccl_us} "
            f"| {nccl:.0f} | {one.flux_us} | {ours:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(), kernels_table(), sep="\n\n")
