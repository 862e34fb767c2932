"""`gemm_a2a.py` for Hopper, in Gluon: the same routes and signals, at the speed of a library GEMM.

    producer   draws tiles, those of remote groups first, and loads their operands
    MMA warps  hand each finished tile to the store warp and go on with the next
    store warp stores a tile where its rows came from, no further than the end of its group: in y,
               or in the source rank's region, where the last tile of a signal's groups raises [Z]

Tiles wait for nobody. A kernel behind this one awaits [Z] and copies to y what other ranks have
made (`expert_collect_kernel`).
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flux_megatron.kernels import descriptors, launch
from flux_megatron.kernels.experts.call import ExpertCall, expert_config
from flux_megatron.kernels.experts.gemm_a2a import expert_collect
from flux_megatron.kernels.experts.hopper_routes import Routes, expert_operand, store_clipped
from flux_megatron.kernels.experts.routes import (
    OWN_RECV_TILES,
    RECV_COUNT,
    RECV_REMOTE_ROW,
    RECV_ROW,
    RECV_TILE,
    RECV_TILES,
)
from flux_megatron.kernels.experts.weights import ExpertWeights
from flux_megatron.kernels.gluon_versions import Descriptor, Number, Pointer, aggregate
from flux_megatron.kernels.hopper.handed_tiles import run_roles
from flux_megatron.kernels.hopper.signals import Signals
from flux_megatron.kernels.hopper.split_k import whole_tiles
from flux_megatron.kernels.hopper.tile_order import Sizes
from flux_megatron.kernels.hopper_primitives import complete_tma_stores, uniform
from flux_megatron.kernels.triton_launch import launch_kernel


@aggregate
class RowsHere:
    """Operands of the producer warp: rows of x, there from the beginning, and the matrices of all
    experts. The `own` tiles, first in the routes, come last.
    """

    x_desc: Descriptor
    w_desc: Descriptor
    w_first: Number
    w_pitch: Number
    routes: Routes
    sizes: Sizes
    own: Number
    tiles: Number

    @gluon.jit
    def begin(self):
        return 0, 0  # it waits for nobody

    @gluon.jit
    def load_ahead(self, ring, grid, work):
        return 0  # only routes say which rows these are

    @gluon.jit
    def locate(self, place, grid, tiles):
        return self.group_tile(place, grid).encoded(self.sizes.BLOCK_M)

    @gluon.jit
    def group_tile(self, place, grid):
        tile = place + self.own
        if tile >= self.tiles:
            tile -= self.tiles
        return self.routes.locate(tile, grid.columns, self.sizes.GROUP_M, self.sizes.BLOCK_M)

    @gluon.jit
    def load(self, ring, scheduler, work, encoded, row, n, loaded, awaited, deadline):
        group = encoded // 2
        w_row, w_col = expert_operand(
            group % self.routes.EXPERTS, n, self.w_first, self.w_pitch, self.sizes, ring.LAYOUT_NN
        )
        row += uniform(self.routes.of_group(RECV_ROW, group))
        loaded, ticket = ring.load_tile(
            self.x_desc, self.w_desc, row, w_col, work, loaded, scheduler.words, w_row
        )
        return loaded, ticket, awaited


@aggregate
class ReturnedRows:
    """Where the store warp puts tiles: in y, and in the regions of other ranks."""

    y: Pointer
    received_desc: Descriptor
    operands: RowsHere
    sizes: Sizes

    @gluon.jit
    def store(self, place, grid, staging, finished):
        sizes = self.sizes
        routes = self.operands.routes
        tile = self.operands.group_tile(place, grid)
        step = tile.group // routes.EXPERTS
        owner = (routes.rank + step) % routes.WORLD_SIZE
        out = self.y
        if step != 0:
            out = routes.region(owner, self.received_desc.dtype)
        first = routes.of_group(RECV_REMOTE_ROW, tile.group).to(gl.int64)
        mbarrier.wait(staging.full, finished & 1)
        store_clipped(out + first * sizes.N, tile, staging.tile, sizes, self.received_desc)
        complete_tma_stores()
        mbarrier.arrive(staging.empty, count=1)
        if step != 0:
            routes.announce(
                RECV_TILE, RECV_COUNT, tile.group, owner, grid.columns, sizes.BLOCK_M
            )  # signal [Z]


# numbers that change from call to call must not compile a kernel each
@gluon.jit(do_not_specialize=["rank", "epoch", "timeout_ns", "w_first", "w_pitch"])
def hopper_gemm_a2a_kernel(
    x_desc, w_desc, received_desc, y, routes, pointers, pad, pad_pointers, status, work_words,
    rank, epoch, timeout_ns: tl.int64, w_first, w_pitch, N, K, CONFIG: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = received_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = received_desc.block_type.shape[1]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    sizes = Sizes(rank, N, N, K, CONFIG.WORLD_SIZE, CONFIG.GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K)
    signals = Signals(pad, status, epoch, timeout_ns)
    routing = Routes(
        routes, pointers, pad_pointers, signals, rank, CONFIG.WORLD_SIZE, CONFIG.EXPERTS,
        CONFIG.PER_SIGNAL, CONFIG.BLOCK_G, CONFIG.HEADER,
    )  # fmt: skip
    columns = gl.cdiv(N, BLOCK_N)
    count = gl.load(routing.word(RECV_TILES)) * columns
    own = gl.load(routing.word(OWN_RECV_TILES)) * columns
    tiles = whole_tiles(count, gl.num_programs(0))
    operands = RowsHere(x_desc, w_desc, w_first, w_pitch, routing, sizes, own, count)
    targets = ReturnedRows(y, received_desc, operands, sizes)
    run_roles(
        operands, targets, None, x_desc, w_desc, received_desc, tiles, work_words, True, CONFIG
    )  # fmt: skip


def gemm_a2a(
    x: Tensor, w: ExpertWeights, received: Tensor, routes: Tensor, about: ExpertCall, *,
    tokens: int,
) -> Tensor:  # fmt: skip
    """As `gemm_a2a.gemm_a2a`, for what `hopper.gemm.refuses_experts` does not refuse. `received`
    [capacity, N] are the rows of this rank's region.
    """
    tile, layout, N = about.tile, about.layout, w.columns(about.layout)
    y = x.new_empty(tokens, N)
    described = descriptors.described
    launch_kernel(
        hopper_gemm_a2a_kernel, launch.persistent_grid(x.device, about.most_tiles(N)), tile,
        (
            described(x, tile.block_m, tile.block_k),
            descriptors.described_w(w.rows(), layout, tile.block_k, tile.block_n),
            described(received, tile.block_m, tile.block_n),
            y, routes, *about.call.tensors, about.call.channel.work_counter,
        ),
        (*about.call.numbers, w.first, w.pitch), (N, x.shape[1]), CONFIG=expert_config(about),
    )  # fmt: skip
    expert_collect(received, y, routes, about)
    return y
