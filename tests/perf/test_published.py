"""Published operation-level results beside what the model predicts for the same operations: the
figures of docs/reference/cost_model.md.

Nothing is fitted to them: they test how far constants from 4 x H200 carry. The operations are the
FLUX paper's (arXiv 2406.06858, operation level, TP 8 within a node): all-gather and GEMM of
(n, k) = (49152, 12288), GEMM and reduce-scatter of (12288, 49152), m = 1024 to 8192, bf16. Its
released code (bytedance/flux, README of 1.1) gives times for m = 4096 in fp16.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from flux_megatron.lab.perf.collectives import collective_us
from flux_megatron.lab.perf.hardware import A100, A100_PCIE, H800
from flux_megatron.lab.perf.linear import Linear, operator_us
from flux_megatron.lab.perf.operator_cost import gemms_us, moved_bytes

PAGE = {  # E of FLUX over m and both operations: the paper's range, and ours
    "A100 PCIe": (A100_PCIE, (0.41, 0.57), (0.43, 0.51)),
    "A100 NVLink": (A100, (0.36, 0.96), (0.41, 0.98)),
    "H800 NVLink": (H800, (0.37, 0.93), (0.38, 0.95)),
}
# an A100 whose NVLink has 400 of 600 GB/s
A800 = replace(
    A100,
    **{name: getattr(A100, name) * 2 / 3 for name in ("copy_gbps", "nccl_gbps", "store_gbps")},
)
KERNELS = (  # GPU, column, us of torch's GEMM, of what NCCL adds to it, and of FLUX's kernel
    (A800, True, 2438, 662, 2469),
    (A800, False, 2453, 646, 2508),
    (H800, True, 846, 583, 957),
    (H800, False, 818, 590, 932),
)


def problem(column, m):
    n, k = (49152, 12288) if column else (12288, 49152)
    return Linear(column, m, n, k, tp=8).forward


def times(hardware, column, m):
    """GEMM, collective and our operation."""
    one = problem(column, m)
    nccl = collective_us(hardware, moved_bytes(one), one.world_size)
    return sum(gemms_us(one, hardware)), nccl, operator_us(one, "auto", hardware)


@pytest.mark.parametrize("cluster", PAGE)
def test_shares_of_hidden_communication_are_those_of_the_page_and_near_the_papers(cluster):
    hardware, paper, page = PAGE[cluster]
    found = [times(hardware, column, m) for column in (0, 1) for m in (1024, 2048, 4096, 8192)]
    shares = [1 - (ours - gemm) / nccl for gemm, nccl, ours in found]
    assert (round(min(shares), 2), round(max(shares), 2)) == page
    assert page == pytest.approx(paper, abs=0.07)


@pytest.mark.parametrize(("hardware", "column", "gemm", "nccl", "flux"), KERNELS)
def test_times_are_near_those_of_fluxs_readme(hardware, column, gemm, nccl, flux):
    found = times(hardware, column, 4096)
    assert found[0] == pytest.approx(gemm, rel=0.08)
    assert found[1:] == pytest.approx((nccl, flux), rel=0.11)
