"""The plans of `low_latency`: tiles of few rows, and into how many parts they cut K.

A tile has all rows of x, so w is read once. What is fastest follows rows, columns and the shared
memory of an SM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import torch

from flux_megatron.kernels import shared_memory
from flux_megatron.kernels.sizes import cdiv, next_power_of_2, rows_of
from flux_megatron.patterns import Pattern
from flux_megatron.problem import Plan, Problem, Tile

# Of ranks that send whole partials to one another: each receives R of them. In two phases it
# receives 2, after twice the latency.
MOST_ONE_SHOT = 4


def default_plan(problem: Problem) -> Plan:
    """Tiles of few columns: w is read once, by as many SMs as can be."""
    two_phase = problem.pattern is Pattern.GEMM_AR and problem.world_size > MOST_ONE_SHOT
    if problem.device == "cpu":  # few large tiles: an interpreted one costs the same
        block_n, block_k = (
            max(16, min(256, next_power_of_2(size))) for size in (problem.N, problem.K_local)
        )
        tile = Tile(16, block_n, block_k, num_warps=4)
    elif problem.dtype == "float32":  # full-precision products run on CUDA cores
        tile = Tile(16, 32, 32, num_warps=4)
    elif not _on_hopper():  # others have less shared memory
        narrow = problem.M <= 16 and problem.layout == "nt"
        tile = _tile(32, 128, 5) if narrow else _tile(64, 64, 5 if problem.M <= 64 else 3)
    else:
        return _plans_on_hopper(problem, two_phase)[0]
    return Plan("low_latency", tile=tile, two_phase=two_phase)


def candidates(problem: Problem) -> list[Plan]:
    """Plans worth measuring, if they fit: tiles of other shapes, and one phase instead of two."""
    default = default_plan(problem)
    if problem.device == "cpu" or problem.dtype == "float32":
        return [default]
    if _on_hopper():
        plans = _plans_on_hopper(problem, default.two_phase)
    else:
        shapes = ((32, 128, 5), (32, 256, 4), (64, 64, 5), (64, 128, 4), (128, 64, 4))
        tiles = dict.fromkeys((default.tile, *(_tile(*shape) for shape in shapes)))
        plans = [replace(default, tile=tile) for tile in tiles]
    if problem.pattern is Pattern.GEMM_AR:
        plans.append(replace(default, two_phase=not default.two_phase))
    return plans


def why_not(problem: Problem, plan: Plan) -> str | None:
    """Why no call of the problem has this plan, or None: with more rows a tile may not fit."""
    tile = replace(plan.tile, block_m=rows_of(problem.M))
    return shared_memory.refuses(problem, tile, stores_by_tma=False)


def _tile(block_n: int, block_k: int, stages: int, tma: bool = False, num_warps: int = 4) -> Tile:
    return Tile(16, block_n, block_k, num_warps=num_warps, num_stages=stages, tma=tma)


@dataclass(frozen=True)
class Kind:
    """A tile on Hopper for at most `rows` rows, and `width` columns of y for each SM. With `parts`
    K is cut: into as many parts as give each SM so many of them.
    """

    rows: float
    width: float
    tile: Tile
    parts: int = 0

    def holds(self, problem: Problem) -> bool:
        """Whether a problem is one of these. "nn": rows of w are read 128 bytes at a time."""
        if self.tile.block_n < 64 and problem.layout == "nn":
            return False
        fits = self.rows >= problem.M and problem.N_local <= self.width * SMS
        return fits and (not self.parts or self.k_parts(problem) > 1)

    def k_parts(self, problem: Problem) -> int:
        """Into so many parts K is cut; 0 for whole tiles."""
        at_once = self.parts * SMS // cdiv(problem.N_local, self.tile.block_n)
        parts = min(at_once, problem.K_local // LEAST_K)
        return parts if parts > 1 else 0


SMS = 132
LEAST_K = 1280  # of a part: 2560 x 2048 in two was 18 % slower from 64 rows on (H200)
# Rows of today's kernels, bfloat16, TP 2: 16 and 64 rows of 5120 x 8192 and 8192 x 4096 (N x K of a
# rank, H200 and H100, untuned.jsonl, 2026-11-27), 128 rows of 28672 x 8192 and 8192 x 28672 (H200,
# few_rows.jsonl). Elsewhere they are a guess, which a race at the first call corrects.
# The first that holds a problem. With few columns an SM has one CTA with much under way, or several
# that share K; with more, all tiles are resident at once, so that none begins when the others end.
TILES = (
    Kind(32, 32, _tile(32, 128, 5), parts=2),
    Kind(32, 40, _tile(64, 64, 5), parts=2),
    Kind(4, 96, _tile(32, 128, 5)),
    Kind(64, 24, _tile(64, 128, 5), parts=1),
    Kind(64, 32, _tile(32, 128, 5)),
    Kind(64, 32, _tile(64, 128, 5), parts=1),
    Kind(64, 64, _tile(64, 128, 5)),
    Kind(32, 128, _tile(64, 128, 4)),
    Kind(32, math.inf, _tile(64, 64, 5)),
    Kind(64, 128, _tile(128, 128, 4, tma=True, num_warps=8)),
    Kind(64, math.inf, _tile(128, 64, 4, tma=True)),
    Kind(128, 32, _tile(64, 128, 4, tma=True, num_warps=8), parts=1),
    Kind(128, 32, _tile(32, 128, 5)),
    # 4 warps were as fast on one GPU, but took 59.6 us to 40.1 in GEMM+RS of 112 x 8192 x 4096 over
    # two (2 x H200, 2026-11-24, held_out.jsonl)
    Kind(128, 64, _tile(64, 128, 4, tma=True, num_warps=8)),
    Kind(128, 64, _tile(64, 128, 4, tma=True)),
    Kind(128, 128, _tile(128, 64, 6, tma=True, num_warps=8)),
    # and more rows, which no call has: who asks for their plan is refused by `supports`
    Kind(math.inf, math.inf, _tile(256, 64, 4, tma=True, num_warps=8)),
)


def _plans_on_hopper(problem: Problem, two_phase: bool) -> list[Plan]:
    """The default, then all others; TMA from 33 rows on."""
    first = next(kind for kind in TILES if kind.holds(problem))
    kinds = [kind for kind in TILES if kind.tile.tma <= (problem.M > 32)]
    plans = [
        Plan("low_latency", tile=kind.tile, k_parts=kind.k_parts(problem), two_phase=two_phase)
        for kind in (first, *kinds)
    ]
    return [*dict.fromkeys(plans)]


@cache
def _on_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
