"""GEMM+AR of a small y on Hopper: the kernel of GEMM+RS, whose tiles go to every rank. Behind it
each rank adds all of them up (`portable.reduce_received`).
"""

from __future__ import annotations

from functools import lru_cache

import torch

from flux_megatron.kernels import descriptors
from flux_megatron.kernels.hopper import config as hopper_config
from flux_megatron.kernels.hopper import gemm_rs
from flux_megatron.kernels.hopper.config import common_config
from flux_megatron.kernels.hopper.split_tiles import SplitK, split_last_wave
from flux_megatron.kernels.sizes import cdiv, tiles_of_shard
from flux_megatron.kernels.triton_launch import launch_kernel, partial_sums
from flux_megatron.problem import Tile
from flux_megatron.scaling import Scaling, scales_or
from flux_megatron.symm import program
from flux_megatron.symm.program import Memory


@lru_cache(maxsize=256)
def _compiled_for(ranks: int, layout: str, tile: Tile, scaling: Scaling | None) -> gemm_rs.RsConfig:
    common = common_config(1, layout, tile, scaling)
    return gemm_rs.RsConfig(**common, BY_SM=True, CHUNKS=1, RANKS=ranks)


def _sizes(
    M: int, N: int, K: int, device: torch.device, tile: Tile
) -> tuple[SplitK, tuple[int, ...]]:
    """`gemm_rs._sizes` of one rank, whose tiles wait for nobody."""
    tiles, k_tiles = tiles_of_shard(M, N, tile), cdiv(K, tile.block_k)
    split = split_last_wave(tiles, k_tiles, hopper_config.resident_ctas(device), tile)
    return split, (
        M, N, K, 1, *split.numbers(k_tiles), min(split.ctas, split.first_part),
    )  # fmt: skip


def gemm_exchange(
    x: Memory, w: Memory, *, own: Memory, received: Memory, received_pointers: Memory,
    pad_pointers: Memory, pad: Memory, status: Memory, counters: Memory, partial_counters: Memory,
    work_words: Memory, rank: int, world_size: int, epoch: program.Number, timeout_ns: int,
    layout: str, tile: Tile, scaling: Scaling | None = None,
) -> None:  # fmt: skip
    """x [M, K] times w ([N, K] or [K, N]) to block `rank` [M, N] of `received` [R, M, N] on every
    rank, of which this rank's is `own`. Then [B] is signalled there.
    """
    N = w.shape[0] if layout == "nt" else w.shape[1]
    M, K = x.shape
    config = _compiled_for(world_size, layout, tile, scaling and scaling.kind)
    split, sizes = _sizes(M, N, K, x.device, tile)
    elements = split.partials * tile.block_m * tile.block_n
    described = descriptors.described
    block = described(own, tile.block_m, tile.block_n)
    launch_kernel(
        gemm_rs.hopper_gemm_rs_kernel, (split.ctas,), tile,
        (
            described(x, tile.block_m, tile.block_k),
            descriptors.described_w(w, layout, tile.block_k, tile.block_n), block, block, block,
            None, None, *scales_or(x, scaling), partial_sums(x, elements, partial_counters),
            received, received_pointers, pad_pointers, None, None, None, None, None, pad, status,
            counters, partial_counters, work_words,
        ),
        (rank, epoch, timeout_ns, 1, 0, None, None, *sizes),
        CONFIG=config,
    )  # fmt: skip
