"""The predicted time of `hopper` where GPUs of one machine have mailboxes in its memory.

Copies hold no SM, so a call takes the longer of its GEMM and its bytes, and what no other hides:
the first of the pieces that travel is made before, or the last multiplied behind. Microseconds.
"""

from __future__ import annotations

from flux_megatron.lab.perf.hardware import Hardware
from flux_megatron.problem import COMM_TILES_MAX, Problem

# Fitted to the fastest plan of `hopper` in 16 calls of docs/results/h200x2/machines.jsonl (2 x H200
# that were told to reach none of each other, 210642fd), with their own times of GEMM: 6 % too short
# to 5 % too long.
RATE = 1.25  # of copies both ways, by that of NCCL's all-gather there
EDGE_US = 50.0


def predict_us(
    problem: Problem, hardware: Hardware, moved_bytes: int, share_of_x: float,
    gemms: tuple[float, float],
) -> float:  # fmt: skip
    """AG+GEMM, GEMM+RS or GEMM+AR of `moved_bytes`. The second of the `gemms` follows on the
    caller's stream; in a column layer's backward x, `share_of_x` of these bytes, is gathered first.
    """
    ranks, (gemm, behind) = problem.world_size, gemms
    moved = moved_bytes * (ranks - 1) / ranks / (RATE * hardware.nccl_gbps) * 1e-3
    piece = gemm / COMM_TILES_MAX / ranks
    if problem.spec.gathers:
        return max(gemm, moved + piece) + behind + EDGE_US
    if problem.spec.scatters:
        gathered = share_of_x * moved if behind else 0.0
        return max(gemm + behind, max(piece, gathered) + moved) + EDGE_US
    return max(gemm, piece + moved) + EDGE_US + max(moved + EDGE_US, behind)
