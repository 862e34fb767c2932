"""What the models of `hopper`'s tiles share: how long a tile and a push take, and the order of
tiles.
"""

from __future__ import annotations

from collections.abc import Iterator

from flux_megatron.perf.constants import FITTED
from flux_megatron.problem import Problem, Tile

WIDE = 128 * 256  # elements of the tile that `perf.constants` speaks of
# Of the main loop's rate of a tile of 128 x 256, where all SMs are busy, by rows and columns: GEMMs
# alone on an H200 (2026-11-23, torch 2.11, triton 3.6, docs/results/h200/gemm_slices.jsonl). The
# choice by them is 0.2 % behind the fastest tile of later rows too (gemm_groups.jsonl beside).
RATES = {
    (128, 320): 0.9, (128, 192): 0.96, (128, 160): 0.84, (128, 128): 0.94,
    (64, 192): 0.89, (64, 160): 0.76, (64, 128): 0.85, (64, 64): 0.6,
}  # fmt: skip
# Of that, with w [K, N]: a row of its block of 32 columns is half of what TMA fetches at once.
NN_32 = 0.85
# Of the copy engine's latency, what the next push waits for: 24 pushes of 128 KiB each took 231 us
# in all, where the GEMM takes 57. From the shipped plans of 4 x H200 (2026-11-21, torch 2.11,
# triton 3.6), as the other numbers of these models.
PUSH_SHARE = 0.65


def main_loop_us(problem: Problem, tile: Tile, sms: int, tflops: float) -> float:
    """Of a tile, on an SM of a GPU that reaches `tflops` with all."""
    share = RATES.get((tile.block_m, tile.block_n), 1.0)
    if problem.layout == "nn" and tile.block_n % 64:
        share *= NN_32
    rate = FITTED.gemm_rate * share * tflops * 1e6 / sms
    return 2 * tile.block_m * tile.block_n * problem.K_local / rate


def area(tile: Tile) -> float:
    """In wide tiles."""
    return tile.block_m * tile.block_n / WIDE


def in_groups(rows: int, columns: int, group: int) -> Iterator[tuple[int, int]]:
    """Rows and columns of tiles: column by column in each group of rows."""
    for first in range(0, rows, group):
        for column in range(columns):
            for row in range(first, min(first + group, rows)):
                yield row, column


def pushed_us(pushes: int, latency_us: float) -> float:
    """So many pushes of a copy engine without their bytes."""
    return (PUSH_SHARE * (pushes - 1) + 1) * latency_us
