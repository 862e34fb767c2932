"""Host arithmetic on sizes; Triton's own functions of these names are slow on the host."""

from __future__ import annotations

from flux_megatron.problem import Tile
from flux_megatron.symm.signals import SPLIT_TILES


def cdiv(size: int, block: int) -> int:
    """Blocks that cover `size`."""
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def tiles_of_shard(M_shard: int, N: int, tile: Tile) -> int:
    """GEMM tiles of a shard, those at its edges included."""
    return cdiv(M_shard, tile.block_m) * cdiv(N, tile.block_n)


def rows_of(M: int) -> int:
    """The rows of a tile that has all M rows of x."""
    return max(16, next_power_of_2(M))


def parts_of(wanted: int, N: int, tile: Tile) -> int:
    """Into so many parts K is cut: those of a plan, 0 for one, as far as there are counters."""
    return wanted if wanted and cdiv(N, tile.block_n) <= SPLIT_TILES else 1


def part_columns(K: int, parts: int, block_k: int) -> int:
    """Columns of x in each of so many parts of K, whole k-tiles; the last part may have fewer."""
    return cdiv(cdiv(K, block_k), parts) * block_k


def partial_sums(M: int, N: int, tile: Tile, parts: int) -> tuple[int, ...]:
    """The shape of what the parts of K leave: as many sums of each tile."""
    return cdiv(N, tile.block_n), parts, rows_of(M), tile.block_n


def values_in_word(itemsize: int) -> int:
    """Values of so many bytes in the 32 bits of data of a word."""
    return 4 // itemsize
