"""What is known of the Hopper kernels before a call: which problems they take, and which tiles are
made when.

The kernels are written in Gluon, because Triton's own pipelining leaves no room for work between
the k-tiles of a tile: waits, publishing, partial tiles. They run on sm_90 only and have no
interpreter; the portable kernels are their readable reference. Nothing here needs Gluon before it
is called.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache

import torch

from flux_megatron.kernels import launch
from flux_megatron.kernels.hopper.config import LOW, TILE
from flux_megatron.kernels.portable.signalled_gemm import Band
from flux_megatron.kernels.sizes import cdiv
from flux_megatron.problem import Problem, Tile
from flux_megatron.versions.triton import TRITON

_DTYPES = ("bfloat16", "float16")
_FP8 = ("float8_e4m3fn", "float8_e5m2")


@cache
def _not_compiled() -> str | None:
    """Why a Triton that is newer than those that were run cannot compile the kernels, or None."""
    if TRITON.untested() is None:
        return None
    try:
        from flux_megatron.kernels.hopper import probe as hopper_probe

        hopper_probe.compile_kernels()
    except Exception as error:  # a name of Gluon's that has moved, or what a pass raises
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        return f"this Triton cannot compile the Hopper kernels ({reason})"
    return None


def supports(problem: Problem) -> str | None:
    """Why these kernels cannot run the problem, or None."""
    K, N = problem.K_local, problem.N_local
    dtypes = _FP8 if problem.scaled else _DTYPES
    reason = _refused(problem.device, problem.dtype, K, N, dtypes)
    if reason := reason or launch.supports_scaled(problem):
        return reason
    if problem.spec.gathers:
        # a last tile that ends with its shard begins in it
        if problem.M_shard < LOW[0].block_m and problem.world_size > 1:
            return f"M_shard {problem.M_shard} is below {LOW[0].block_m} rows"
    return None


def _refused(
    device: str, dtype: str, K: int, N: int, dtypes: tuple[str, ...] = _DTYPES
) -> str | None:
    """Why no Hopper kernel multiplies x [*, K] and w of N columns in this process, or None."""
    if device != "cuda":
        return f"Hopper kernels need a GPU of compute capability 9, {device} given"
    if (capability := torch.cuda.get_device_capability())[0] != 9:
        given = ".".join(map(str, capability))
        return f"Hopper kernels need a GPU of compute capability 9, this one has {given}"
    if dtype not in dtypes:
        return f"dtype {dtype} is none of {', '.join(dtypes)}"
    if K % 8 or N % 8:
        return f"rows of K {K} or N {N} are not whole 16-byte units"
    return _not_compiled()


@lru_cache(maxsize=1024)
def refuses_bands(
    device: str, dtype: torch.dtype, K: int, N: int, shards: int, bands: tuple[Band, ...],
    tile: Tile,
) -> str | None:  # fmt: skip
    """Why `hopper.signalled_gemm` cannot make these bands, which the portable kernel then makes, or
    None. It depends on nothing that differs between ranks.
    """
    if reason := _refuses_tile(device, dtype, K, N, tile):
        return reason
    # the last rows of all may be clipped, as TMA does at the end of a matrix
    for band in bands[:-1] if shards == 1 else bands:
        if band.rows % TILE.block_m:
            return f"a band of {band.rows} rows is not a multiple of {TILE.block_m} rows"
    return None


@lru_cache(maxsize=1024)
def refuses_gathered(
    device: str, dtype: torch.dtype, K: int, N: int, bands: tuple[Band, ...], tile: Tile
) -> str | None:
    """The same of `hopper.gathered_gemm`."""
    if reason := _refuses_tile(device, dtype, K, N, tile):
        return reason
    fewest = min(band.rows for band in bands)
    if fewest < TILE.block_m:
        return f"a band of {fewest} rows is lower than a tile of {TILE.block_m}"
    return None


def _refuses_tile(device: str, dtype: torch.dtype, K: int, N: int, tile: Tile) -> str | None:
    if reason := _refused(device, str(dtype).removeprefix("torch."), K, N):
        return reason
    if replace(tile, group_m=TILE.group_m) != TILE:
        return f"tile {tile} given, {TILE} with any group_m expected"
    return None


def refuses_experts(device: str, dtype: torch.dtype, K: int, N: int, layout: str) -> str | None:
    """Why the Hopper kernels of expert parallelism cannot multiply by w of experts, or None."""
    if reason := _refused(device, str(dtype).removeprefix("torch."), K, N):
        return reason
    if layout == "nn" and K % TILE.block_k:  # a k-tile would reach into the next expert
        return f"K {K} of layout 'nn' is not a multiple of {TILE.block_k}"
    return None


def made_at(hops: int, number: int, M_shard: int, N: int, world_size: int, tile: Tile) -> int:
    """The place, in the order in which `gemm_rs` makes tiles, of tile `number` of the shard of the
    rank that follows this one by `hops` + 1. The order is `rs_tile`'s.
    """
    tiles_m, tiles_n = cdiv(M_shard, tile.block_m), cdiv(N, tile.block_n)
    group_m = min(tile.group_m, tiles_m)
    first, within = number // (group_m * tiles_n) * group_m, number % (group_m * tiles_n)
    height = min(tiles_m - first, group_m)
    row, n = hops * tiles_m + first + within % height, within // height
    first = row // tile.group_m * tile.group_m
    height = min(tiles_m * (world_size - 1) - first, tile.group_m)
    return first * tiles_n + n * height + row - first
