"""Launchers of the Hopper kernels, and which problems they take.

Written in Gluon, because Triton's own pipelining leaves no room for work between the steps of a
tile: waits, publishing, partial tiles. They run on sm_90 only and have no interpreter; the portable
kernels are their readable reference.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from flux_megatron.kernels import launch
from flux_megatron.kernels.hopper_cuts import STEPS_MIN, Cuts, cuts_of_gather, cuts_of_scatter
from flux_megatron.kernels.launch import Launcher
from flux_megatron.kernels.sizes import cdiv
from flux_megatron.problem import Problem, Tile
from flux_megatron.symm.signals import PARTIAL_COUNTERS, WORK_WORDS

TILE = Tile(block_m=128, block_n=256, block_k=64, group_m=8, num_warps=8, num_stages=3, tma=True)
COMM_TILES_MAX = 8  # of a shard: a program remembers in 64 bits what has arrived from 8 ranks
_DTYPES = ("bfloat16", "float16")


@cache
def _gluon_unavailable() -> str | None:
    try:
        from flux_megatron.kernels import hopper_ag_gemm, hopper_gemm_rs  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"this Triton has no Gluon for Hopper ({error})"
    return None


def supports(problem: Problem) -> str | None:
    """Why these kernels cannot run the problem, or None."""
    if problem.device != "cuda" or torch.cuda.get_device_capability()[0] != 9:
        return "Hopper kernels need a GPU of compute capability 9"
    if problem.dtype not in _DTYPES:
        return f"dtype {problem.dtype} is none of {', '.join(_DTYPES)}"
    if reason := launch.supports(problem) or _gluon_unavailable():
        return reason
    if problem.K_local % 8 or problem.N_local % 8:
        return f"rows of K {problem.K_local} or N {problem.N_local} are not whole 16-byte units"
    if problem.spec.gathers:
        if problem.M_shard % TILE.block_m:
            return f"M_shard {problem.M_shard} is not a multiple of {TILE.block_m} rows"
        return None
    K_min = STEPS_MIN * (problem.world_size - 1) * TILE.block_k
    return None if problem.K_local >= K_min else f"K {problem.K_local} is below {K_min}"


@lru_cache(maxsize=64)
def _layout(block: tuple[int, ...], dtype: torch.dtype):
    from triton.experimental.gluon import language as gl

    element = gl.bfloat16 if dtype is torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for(list(block), element)


class _Address(NamedTuple):
    """What a descriptor needs of a tensor: kept in its place, it keeps no memory alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


@lru_cache(maxsize=4096)  # making one costs the host 10 us
def _descriptor(base: _Address, shape: torch.Size, block: tuple[int, ...]):
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    rows, columns = shape
    layout = _layout(block, base.dtype)
    return TensorDescriptor(base, [rows, columns], [columns, 1], list(block), layout)


def _described(tensor: Tensor, *block: int):
    return _descriptor(_Address(tensor.data_ptr(), tensor.dtype), tensor.shape, block)


def _described_w(w: Tensor, layout: str, tile: Tile):
    if layout == "nt":
        return _described(w, tile.block_n, tile.block_k)
    return _described(w, tile.block_k, tile.block_n)


@lru_cache(maxsize=1024)
def _ag_launcher(
    x: torch.Size, N: int, world_size: int, dtype: torch.dtype, device: torch.device,
    bias: bool, layout: str, tile: Tile, cut_shards: int, copy_own: bool, recorded: bool = False,
) -> tuple[Launcher, int]:  # fmt: skip
    from flux_megatron.kernels.hopper_ag_gemm import hopper_ag_gemm_kernel

    M_shard, K = x
    own = tiles_of_shard(M_shard, N, tile)
    cuts = cuts_of_gather(own, world_size, cut_shards, cdiv(K, tile.block_k), processors(device))
    run = Launcher(
        hopper_ag_gemm_kernel, (cuts.programs,), tile,
        (M_shard, N, K, cuts.early, cuts.works, cuts.split_first, min(cuts.programs, cuts.whole)),
        WORLD_SIZE=world_size, CUT=cuts.parts, SPLIT=cuts.split, STAGES=tile.num_stages,
        LAYOUT_NN=layout == "nn", HAS_BIAS=bias, COPY_OWN=copy_own,
        NUM_PROGRAMS=cuts.programs,
    )  # fmt: skip
    return run, cuts.partials * tile.block_m * tile.block_n


def ag_gemm(
    x: Tensor, gathered: Tensor, w: Tensor, bias: Tensor | None, *,
    pad: Tensor, status: Tensor, part_counters: Tensor, work_counter: Tensor, rank: int,
    epoch: int, timeout_ns: int, comm_rows: int, layout: str, tile: Tile, cut_shards: int,
    copy_own: bool, waits: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x [M_shard, K] and gathered [R * M_shard, K] times w ([N, K] or [K, N]) + bias [N].

    Gives y [R * M_shard, N]. `copy_own`: the kernel also copies x to the own rows of `gathered`.
    `cut_shards`: how many shards' tiles are cut along K, if a shard has fewer than there are
    multiprocessors. `waits` is a buffer of `wait_records`, or None.
    """
    M, N = gathered.shape[0], w.shape[0] if layout == "nt" else w.shape[1]
    y = x.new_empty(M, N)
    own_rows = gathered[rank * x.shape[0] :] if copy_own else gathered
    run, sums = _ag_launcher(
        x.shape, N, M // x.shape[0], x.dtype, x.device, bias is not None, layout, tile, cut_shards,
        copy_own, waits is not None,
    )  # fmt: skip
    run(
        (
            _described(x, tile.block_m, tile.block_k),
            _described(gathered, tile.block_m, tile.block_k),
            _described_w(w, layout, tile),
            _described(y, tile.block_m, tile.block_n),
            bias if bias is not None else x, x, own_rows,
            x.new_empty(sums, dtype=torch.float32) if sums else x, pad, status, waits,
            part_counters, work_counter,
        ),
        (rank, epoch, timeout_ns, comm_rows),
    )  # fmt: skip
    return y


def gemm(x: Tensor, w: Tensor, layout: str, tile: Tile = TILE) -> Tensor:
    """x [M, K] times w ([N, K] or [K, N]), without any communication: the baseline of a tile."""
    words = _nothing(x.device)
    return ag_gemm(
        x, x, w, None, pad=words, status=words, part_counters=words,
        work_counter=words[PARTIAL_COUNTERS:], rank=0, epoch=0,
        timeout_ns=10**9, comm_rows=x.shape[0], layout=layout, tile=tile, cut_shards=0,
        copy_own=False,
    )  # fmt: skip


@cache
def _nothing(device: torch.device) -> Tensor:
    return torch.zeros(PARTIAL_COUNTERS + WORK_WORDS, dtype=torch.int32, device=device)


def processors(device: torch.device) -> int:
    """Programs that run at once: one a multiprocessor."""
    (programs,) = launch.persistent_grid(device, 1 << 30)
    return programs


def cuts_of(problem: Problem, tile: Tile, cut_shards: int, device: torch.device) -> Cuts:
    """Which tiles of a problem are cut."""
    own = tiles_of_shard(problem.M_shard, problem.N_local, tile)
    cuts = cuts_of_gather if problem.spec.gathers else cuts_of_scatter
    steps = cdiv(problem.K_local, tile.block_k)
    return cuts(own, problem.world_size, cut_shards, steps, processors(device))


def tiles_of_shard(M_shard: int, N: int, tile: Tile) -> int:
    """GEMM tiles of a shard, those at its edges included."""
    return cdiv(M_shard, tile.block_m) * cdiv(N, tile.block_n)


def last_made(
    M_shard: int, N: int, world_size: int, tiles_comm: int, tile: Tile
) -> dict[tuple[int, int], int]:
    """When `gemm_rs` makes the last tile of each communication tile of another shard.

    Keys are (steps to the owner - 1, communication tile), values places in the order of all tiles;
    that order is `rs_tile`'s.
    """
    tiles_m, tiles_n = cdiv(M_shard, tile.block_m), cdiv(N, tile.block_n)
    group_m, rows = min(tile.group_m, tiles_m), tiles_m * (world_size - 1)
    last: dict[tuple[int, int], int] = {}
    place = 0
    for first in range(0, rows, tile.group_m):
        for n in range(tiles_n):
            for row in range(first, min(first + tile.group_m, rows)):
                step, m = divmod(row, tiles_m)
                before = m // group_m * group_m
                number = before * tiles_n + n * min(tiles_m - before, group_m) + m - before
                last[step, number // tiles_comm] = place
                place += 1
    return last


@lru_cache(maxsize=1024)
def _rs_launcher(
    x: torch.Size, N: int, world_size: int, dtype: torch.dtype, device: torch.device, layout: str,
    tile: Tile, cut_shards: int, by_sm: bool, recorded: bool = False,
) -> tuple[Launcher, int]:  # fmt: skip
    from flux_megatron.kernels.hopper_gemm_rs import hopper_gemm_rs_kernel

    M, K = x
    M_shard = M // world_size
    own = tiles_of_shard(M_shard, N, tile)
    cuts = cuts_of_scatter(own, world_size, cut_shards, cdiv(K, tile.block_k), processors(device))
    others = own * (world_size - 1)  # the tiles behind them wait for other ranks
    run = Launcher(
        hopper_gemm_rs_kernel, (cuts.programs,), tile,
        (
            M_shard, N, K, cuts.early_last - cuts.early, cuts.early_last, cuts.works,
            cuts.split_first, min(cuts.programs, cuts.whole, others),
        ),
        WORLD_SIZE=world_size, CUT=cuts.parts, SPLIT=cuts.split, STAGES=tile.num_stages,
        LAYOUT_NN=layout == "nn", BY_SM=by_sm,
        LATE=own <= cuts.programs, NUM_PROGRAMS=cuts.programs,
    )  # fmt: skip
    return run, cuts.partials * tile.block_m * tile.block_n


def gemm_rs(
    x: Tensor, w: Tensor, *, parts: Tensor, slots: Tensor, slot_pointers: Tensor,
    pad_pointers: Tensor, pad: Tensor, status: Tensor, counters: Tensor, part_counters: Tensor,
    work_counter: Tensor, rank: int, world_size: int, epoch: int, timeout_ns: int, tiles_comm: int,
    layout: str, tile: Tile, cut_shards: int, by_sm: bool, waits: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x [M, K] times w ([N, K] or [K, N]), summed over ranks: y [M / R, N].

    | tensor | shape, with T tiles [B_M, B_N] a shard |
    | --- | --- |
    | parts | [(R - 1) * T * B_M, B_N]: this rank's tiles for rank+1, rank+2, ...; `by_sm`: unused |
    | slots | [R * T * B_M, B_N]: the tiles that rank 0, 1, ... have sent to this rank |
    | waits | a buffer of `wait_records`, or None |

    `cut_shards` of 1: the last tiles of other shards, which fill no wave, are cut along K, so that
    they are sent before the last wave ends.
    """
    N = w.shape[0] if layout == "nt" else w.shape[1]
    y = x.new_empty(x.shape[0] // world_size, N)
    block = (tile.block_m, tile.block_n)
    run, sums = _rs_launcher(
        x.shape, N, world_size, x.dtype, x.device, layout, tile, cut_shards, by_sm,
        waits is not None,
    )  # fmt: skip
    run(
        (
            _described(x, tile.block_m, tile.block_k),
            _described_w(w, layout, tile),
            _described(parts, *block),
            _described(slots, *block),
            _described(y, *block), x.new_empty(sums, dtype=torch.float32) if sums else x,
            slot_pointers, pad_pointers, pad, status, waits, counters, part_counters, work_counter,
        ),
        (rank, epoch, timeout_ns, tiles_comm),
    )  # fmt: skip
    return y
