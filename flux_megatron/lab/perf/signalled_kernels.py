"""Which kernel makes the bands of a `signalled` plan, and what the wave model knows of each."""

from __future__ import annotations

from typing import NamedTuple

from flux_megatron.lab.perf.hardware import Hardware
from flux_megatron.problem import Plan, Problem


class Terms(NamedTuple):
    """Fitted to 2 x H200, NCCL 2.28.9, beside measured curves (`tests/perf/test_wave_fit.py`).

    tile_us: time of a tile of 128 x 256 beside its main loop
    group_us: from a band's last tile to the end of its collective, beside the curve
    narrow: share of a tile's time that it takes longer where each tile row reads w itself
    beside: time of a collective beside the GEMM, by its time alone
    """

    name: str
    tile_us: float
    group_us: float
    narrow: float
    beside: float


# docs/results/h200x2/signalled_hopper.jsonl, 72 groupings
HOPPER = Terms("hopper_signalled_gemm", tile_us=2.34, group_us=17.9, narrow=0.25, beside=1.074)
# docs/results/h200x2/signalled.jsonl, 28 groupings, rows with `cga_cluster_size` 1
PORTABLE = Terms("signalled_gemm", tile_us=9.62, group_us=21.3, narrow=0.386, beside=1.06)

_TILE = (128, 256, 64)  # rows, columns and k-tile of the Hopper kernel
_DTYPES = ("bfloat16", "float16")


def terms_of(problem: Problem, plan: Plan, hardware: Hardware) -> Terms:
    """The terms of the kernel that will run: as `kernels.hopper_gemm.refuses_bands` decides it,
    for operands at whole 16-byte addresses.
    """
    tile, rows = plan.tile, problem.M_shard if problem.spec.scatters else problem.M
    shape = (tile.block_m, tile.block_n, tile.block_k) == _TILE
    compiled = (tile.num_warps, tile.num_stages, tile.tma) == (8, 3, True)
    units = problem.K_local % 8 == 0 and problem.N_local % 8 == 0
    # the last rows of all may be clipped, those of a shard not
    whole = not any(size % tile.block_m for size in plan.group_rows)
    whole = whole and not (problem.spec.scatters and rows % tile.block_m)
    runs = hardware.hopper and problem.dtype in _DTYPES
    return HOPPER if runs and shape and compiled and units and whole else PORTABLE
