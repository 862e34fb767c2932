"""In which order the Hopper kernels make their tiles: rows that have come first, results that have
to travel first.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flux_megatron.kernels.gluon_versions import Number, aggregate
from flux_megatron.kernels.hopper_primitives import here


@aggregate
class TileGrid:
    """The tiles of a shard, as rows and columns, and the k-tiles of each."""

    rows: Number
    columns: Number
    k_tiles: Number
    rank: Number
    WORLD_SIZE: gl.constexpr
    GROUP_M: gl.constexpr


@aggregate
class Sizes:
    """The GEMM that a rank makes: M_shard rows for each rank, N columns, sums over K."""

    rank: Number
    M_shard: Number
    N: Number
    K: Number
    WORLD_SIZE: gl.constexpr
    GROUP_M: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    BLOCK_K: gl.constexpr

    @gluon.jit
    def grid(self):
        return TileGrid(
            gl.cdiv(self.M_shard, self.BLOCK_M),
            gl.cdiv(self.N, self.BLOCK_N),
            gl.cdiv(self.K, self.BLOCK_K),
            self.rank, self.WORLD_SIZE, self.GROUP_M,
        )  # fmt: skip

    @gluon.jit
    def grid_here(self):
        """The same in a partition of worker warps: `here` says why."""
        return TileGrid(
            gl.cdiv(here(self.M_shard), self.BLOCK_M),
            gl.cdiv(here(self.N), self.BLOCK_N),
            gl.cdiv(here(self.K), self.BLOCK_K),
            self.rank, self.WORLD_SIZE, self.GROUP_M,
        )  # fmt: skip

    @gluon.jit
    def rows_of(self, tile, grid):
        """Of a tile of GEMM+RS: whose rows these are, its first row in x and column in w."""
        owner, m, n, _, _ = self.locate(tile, grid)
        return owner, owner * self.M_shard + m * self.BLOCK_M, n * self.BLOCK_N

    @gluon.jit
    def locate(self, tile, grid):
        return rs_tile(tile, grid)


@aggregate
class InTurns:
    """The order of GEMM+AR whose sums travel while later ones are made: communication tiles of
    `tiles_comm` tiles, of remote shards and of the local one in turns, the local one so many
    `behind`.
    """

    sizes: Sizes
    tiles_comm: Number
    behind: Number

    @gluon.jit
    def rows_of(self, tile, grid):
        owner, m, n, _, _ = self.locate(tile, grid)
        return owner, owner * self.sizes.M_shard + m * self.sizes.BLOCK_M, n * self.sizes.BLOCK_N

    @gluon.jit
    def locate(self, tile, grid):
        return tile_in_turns(tile, here(self.tiles_comm), here(self.behind), grid)


@gluon.jit
def tile_in_groups(tile, rows, columns, group_m):
    """Row and column, in tiles: `group_m` rows of tiles go column by column, to reuse w in L2."""
    per_group = group_m * columns
    first = tile // per_group * group_m
    height = min(rows - first, group_m)
    within = tile % per_group
    return first + within % height, within // height


@gluon.jit
def number_in_groups(m, n, rows, columns, group_m):
    """The inverse of `tile_in_groups`."""
    first = m // group_m * group_m
    height = min(rows - first, group_m)
    return first * columns + n * height + m - first


@gluon.jit
def ag_tile(tile, grid, tiles):
    """Source rank, and row and column in its shard.

    Local tiles first. Groups of rows span the remote shards, so that small shards share what they
    read of w. But where a shard is few tiles, CTAs that find no local tile go on with columns of
    rank+1, which arrives first, alone.
    """
    local = grid.rows * grid.columns
    head = 0  # columns of rank+1
    if grid.WORLD_SIZE > 1:
        if grid.rows <= 2:
            lacking = gl.cdiv(local, tiles.ctas) * tiles.ctas - local
            head = min(gl.cdiv(lacking, grid.rows), grid.columns)
    behind = grid.rows * (grid.WORLD_SIZE - 2)  # rows of the other ranks in these columns
    place = tile - local
    if place < 0:
        m, n = tile_in_groups(tile, grid.rows, grid.columns, grid.GROUP_M)
    elif place < head * grid.rows:
        m = grid.rows + place % grid.rows
        n = place // grid.rows
    elif place < head * (grid.rows + behind):
        place -= head * grid.rows
        m = 2 * grid.rows + place % behind
        n = place // behind
    else:
        place -= head * (grid.rows + behind)
        m, n = tile_in_groups(place, grid.rows + behind, grid.columns - head, grid.GROUP_M)
        m += grid.rows
        n += head
    return (grid.rank + m // grid.rows) % grid.WORLD_SIZE, m % grid.rows, n


@gluon.jit
def tile_of_all_rows(tile, grid):
    """Source rank, and row and column in its shard, where rows come in parts of K: columns go down
    through all shards, local rows first, so that they share what they read of w.
    """
    rows = grid.rows * grid.WORLD_SIZE
    m, n = tile_in_groups(tile, rows, grid.columns, grid.GROUP_M)
    return (grid.rank + m // grid.rows) % grid.WORLD_SIZE, m % grid.rows, n


@gluon.jit
def rs_tile(tile, grid):
    """Owner rank, row and column in its shard, number in its shard, and how many ranks lie between
    this one and it.

    Groups of rows span the remote shards, so that small shards share what they read of w.
    """
    remote = grid.rows * (grid.WORLD_SIZE - 1)
    group_m = min(grid.GROUP_M, grid.rows)
    if tile < remote * grid.columns:
        m, n = tile_in_groups(tile, remote, grid.columns, grid.GROUP_M)
    else:
        m, n = tile_in_groups(tile - remote * grid.columns, grid.rows, grid.columns, group_m)
        m += remote
    hops = m // grid.rows
    m = m % grid.rows
    number = number_in_groups(m, n, grid.rows, grid.columns, group_m)
    return (grid.rank + 1 + hops) % grid.WORLD_SIZE, m, n, number, hops


@gluon.jit
def tile_in_turns(tile, tiles_comm, behind, grid):
    """What `rs_tile` says, in this order: communication tiles of every remote shard, `behind` of
    each, then in turns one more of these and one of the local shard, whose others come last.
    """
    PEERS: gl.constexpr = grid.WORLD_SIZE - 1
    per_shard = grid.rows * grid.columns
    head = min(behind * tiles_comm, per_shard) * PEERS
    turn = max(tile - head, 0) // (tiles_comm * grid.WORLD_SIZE)
    before = min(head + turn * tiles_comm * PEERS, per_shard * PEERS)  # of remote shards
    until = min(before + tiles_comm * PEERS, per_shard * PEERS)
    remote = before + tile - head - turn * tiles_comm * grid.WORLD_SIZE
    hops = PEERS
    number = tile - until
    if remote < until:
        first = remote // (tiles_comm * PEERS) * tiles_comm
        together = min(tiles_comm, per_shard - first)
        within = remote - first * PEERS
        hops = within // together
        number = first + within % together
    group_m = min(grid.GROUP_M, grid.rows)
    m, n = tile_in_groups(number, grid.rows, grid.columns, group_m)
    owner = (grid.rank + 1 + hops) % grid.WORLD_SIZE
    return owner, m, n, number, hops
