"""Few rows, as in decoding: one kernel multiplies, sends, waits and adds up.

No copy engine, no signal and no barrier: every word of data carries the epoch of its call, so a
gather or a reduce-scatter costs one trip of the data, an all-reduce one or two. Eager and captured
calls are the same call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from flux_megatron.kernels import ag_gemv as ag_gemv_kernels
from flux_megatron.kernels import gemv_ar as gemv_ar_kernels
from flux_megatron.kernels.hopper_config import SHARED_BYTES
from flux_megatron.kernels.sizes import next_power_of_2
from flux_megatron.kernels.triton_launch import empty
from flux_megatron.overlap import transfer
from flux_megatron.overlap.phase import phase
from flux_megatron.patterns import COLUMN, ROW, Pattern
from flux_megatron.problem import Plan, Problem, Tile
from flux_megatron.symm.channel import Call
from flux_megatron.symm.recording import lend
from flux_megatron.symm.word_channel import WordChannel
from flux_megatron.symm.workspace import Workspace

PATTERNS = (COLUMN, ROW, Pattern.GEMM_AR)
MOST_ROWS, half_bytes = gemv_ar_kernels.MOST_ROWS, gemv_ar_kernels.half_bytes
NEEDS_SYMMETRIC_MEMORY = True
RECORDABLE, CHANNEL = PATTERNS, transfer.WORDS
# Of ranks that send whole partials to one another: each receives R of them. In two phases it
# receives 2, after twice the latency.
MOST_ONE_SHOT = 4


def supports(problem: Problem) -> str | None:
    """Why this strategy cannot run the problem, or None."""
    spec = problem.spec
    uneven = transfer.unequal_shards(problem) if spec.gathers or spec.scatters else None
    return uneven or gemv_ar_kernels.supports(problem)


def words_bytes(problem: Problem) -> int:
    """What one call stores on each rank."""
    dtype = getattr(torch, problem.dtype)
    if problem.spec.gathers:
        return ag_gemv_kernels.half_bytes(problem.M, problem.K, dtype)
    return half_bytes(problem.M, problem.N, dtype, problem.world_size)


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
        tile = next(tile for rows, width, tile in TILES if _fits(problem, rows, width, tile))
    return Plan("low_latency", tile=tile, two_phase=two_phase)


def candidates(problem: Problem) -> list[Plan]:
    """Plans worth measuring: tiles of other shapes, and one phase instead of two."""
    default = default_plan(problem)
    if problem.device == "cpu" or problem.dtype == "float32":
        return [default]
    if _on_hopper():
        tiles = [tile for _, _, tile in TILES if tile.tma <= (problem.M > 32)]
        tiles = [tile for tile in tiles if _stages_bytes(problem, tile) <= SHARED_BYTES]
    else:
        shapes = ((32, 128, 5), (32, 256, 4), (64, 64, 5), (64, 128, 4), (128, 64, 4))
        tiles = [_tile(*shape) for shape in shapes]
    plans = [replace(default, tile=tile) for tile in dict.fromkeys((default.tile, *tiles))]
    if problem.pattern is Pattern.GEMM_AR:
        plans.append(replace(default, two_phase=not default.two_phase))
    return plans


def _tile(block_n: int, block_k: int, stages: int, tma: bool = False) -> Tile:
    return Tile(16, block_n, block_k, num_warps=4, num_stages=stages, tma=tma)


# On Hopper: the first whose rows are at least those of x, and whose width is at least y's columns
# for each SM. With few columns an SM has one CTA with much under way; with more, all tiles are
# resident at once, so that none begins when the others end. Decision 46 has the times.
SMS = 132
TILES = (
    (4, 96, _tile(32, 128, 5)),
    (128, 32, _tile(32, 128, 5)),
    (64, 64, _tile(64, 128, 5)),
    (32, 128, _tile(64, 128, 4)),
    (32, math.inf, _tile(64, 64, 5)),
    (64, 128, _tile(64, 64, 5)),
    (64, math.inf, _tile(128, 64, 4, tma=True)),
    (128, 64, _tile(64, 128, 4, tma=True)),
    (128, 128, _tile(64, 64, 4, tma=True)),
    (128, math.inf, _tile(64, 128, 4, tma=True)),
)


def _fits(problem: Problem, rows: int, width: float, tile: Tile) -> bool:
    """Whether a tile of `TILES` is meant for a problem. "nn": rows of w are read 128 bytes at a
    time.
    """
    whole = problem.layout == "nt" or tile.block_n >= 64
    return rows >= problem.M and problem.N_local <= width * SMS and whole


def _stages_bytes(problem: Problem, tile: Tile) -> int:
    rows = max(16, next_power_of_2(problem.M))
    return tile.num_stages * (rows + tile.block_n) * tile.block_k * 2


@cache
def _on_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def start_gather(x: Tensor, plan: Plan, workspace: Workspace) -> transfer.Gather:
    """All-gather x [M_shard, K] by copy engine, beside a GEMM+RS; `complete` gives [M, K]."""
    return transfer.start_gather(x, workspace, plan.comm_rows)


def ag_gemm(
    x: Tensor, w: Tensor, bias: Tensor | None, layout: str, plan: Plan, workspace: Workspace,
    consume: Callable[[Tensor], None] | None,
) -> Tensor:  # fmt: skip
    """all_gather(x) @ w + bias in one kernel; `consume` is called with the gathered rows."""
    M_shard, K = x.shape
    gathered = empty(x, workspace.world_size * M_shard, K)
    call, channel = _begin(workspace, ag_gemv_kernels.half_bytes(len(gathered), K, x.dtype))
    with phase("ag_gemv kernel"):
        y = ag_gemv_kernels.ag_gemv(
            x, gathered, w, bias, arrivals=channel.arrivals, layout=layout, tile=plan.tile,
            **_words(call, channel),
        )  # fmt: skip
    workspace.end(call)
    if consume is not None:
        lend(consume, gathered)
    return y


@dataclass(frozen=True)
class Reduction:
    """A sum over the ranks that its kernel has finished."""

    y: Tensor

    def finish(self) -> Tensor:
        """y [M, N], or this rank's rows of it."""
        return self.y


def start_gemm_rs(x: Tensor, w: Tensor, layout: str, plan: Plan, workspace: Workspace) -> Reduction:
    """reduce_scatter(x @ w) in one kernel; `finish` gives y [M / R, N]."""
    return _reduced(x, w, layout, plan, workspace, scatters=True)


def start_gemm_ar(x: Tensor, w: Tensor, layout: str, plan: Plan, workspace: Workspace) -> Reduction:
    """all_reduce(x @ w) in one kernel; `finish` gives y [M, N]."""
    return _reduced(x, w, layout, plan, workspace, scatters=False)


def _reduced(
    x: Tensor, w: Tensor, layout: str, plan: Plan, workspace: Workspace, scatters: bool
) -> Reduction:
    N = w.shape[0] if layout == "nt" else w.shape[1]
    call, channel = _begin(workspace, half_bytes(x.shape[0], N, x.dtype, workspace.world_size))
    with phase("gemv_ar kernel"):
        y = gemv_ar_kernels.gemv_ar(
            x, w, world_size=call.world_size, layout=layout, tile=plan.tile,
            two_phase=plan.two_phase, scatters=scatters, **_words(call, channel),
        )  # fmt: skip
    workspace.end(call)
    return Reduction(y)


def _begin(workspace: Workspace, size_bytes: int) -> tuple[Call, WordChannel]:
    call = transfer.begin(workspace, transfer.WORDS, size_bytes, WordChannel)
    channel = call.channel
    assert isinstance(channel, WordChannel), f"{type(channel)} given, a WordChannel expected"
    return call, channel


def _words(call: Call, channel: WordChannel) -> dict[str, Any]:
    """What every kernel needs of the words."""
    return {
        "word_pointers": call.pointers, "half_bytes": channel.region_bytes,
        "epochs": channel.epochs, "work": channel.work, "status": call.status, "rank": call.rank,
        "timeout_ns": transfer.timeout_ns(),
    }  # fmt: skip
