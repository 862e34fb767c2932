"""`a2a_gemm.py` for Hopper, in Gluon: the same routes and signals, at the speed of a library GEMM.

    producer   draws tiles, those of local groups first, and loads their operands: rows of x, or
               rows that have come, after [Y]
    MMA warps  hand each finished tile to the store warp and go on with the next
    store warp stores a tile in y, no further than the end of its group
    row warps  push rows to other ranks and signal [Y]; then set the rest of y to 0 and copy rows
               that backward needs (`experts.hopper_rows`)

Pushes wait for nobody and no tile makes them wait, so one resident CTA is enough.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flux_megatron.kernels import descriptors, launch
from flux_megatron.kernels.experts.call import ExpertCall, expert_config
from flux_megatron.kernels.experts.hopper_routes import Routes, expert_operand, store_clipped
from flux_megatron.kernels.experts.hopper_rows import TravellingRows
from flux_megatron.kernels.experts.routes import RECV_ROW, RECV_TILES, SEND_ROW
from flux_megatron.kernels.experts.weights import ExpertWeights
from flux_megatron.kernels.gluon_versions import Descriptor, Number, Pointer, aggregate
from flux_megatron.kernels.hopper.handed_tiles import run_roles
from flux_megatron.kernels.hopper.signals import Signals
from flux_megatron.kernels.hopper.split_k import whole_tiles
from flux_megatron.kernels.hopper.tile_order import Sizes
from flux_megatron.kernels.hopper_primitives import complete_tma_stores, uniform
from flux_megatron.kernels.triton_launch import launch_kernel


@aggregate
class RoutedRows:
    """Operands of the producer warp: x of this rank, rows of others when they have come, and the
    matrices of all experts.
    """

    x_desc: Descriptor
    received_desc: Descriptor
    w_desc: Descriptor
    w_first: Number
    w_pitch: Number
    routes: Routes
    sizes: Sizes

    @gluon.jit
    def begin(self):
        signals = self.routes.signals
        return signals.deadline(), signals.epoch * 0 - 1  # no slot

    @gluon.jit
    def load_ahead(self, ring, grid, work):
        return 0  # only routes say which rows these are

    @gluon.jit
    def locate(self, place, grid, tiles):
        sizes = self.sizes
        tile = self.routes.locate(place, grid.columns, sizes.GROUP_M, sizes.BLOCK_M)
        return tile.encoded(sizes.BLOCK_M)

    @gluon.jit
    def load(self, ring, scheduler, work, encoded, row, n, loaded, awaited, deadline):
        routes = self.routes
        group = encoded // 2
        step = group // routes.EXPERTS
        expert = group % routes.EXPERTS
        w_row, w_col = expert_operand(
            expert, n, self.w_first, self.w_pitch, self.sizes, ring.LAYOUT_NN
        )
        if step == 0:
            first = uniform(routes.of_group(SEND_ROW, group))
            loaded, ticket = ring.load_tile(
                self.x_desc, self.w_desc, first + row, w_col, work, loaded, scheduler.words, w_row
            )
        else:
            slot = routes.slot_of((routes.rank + step) % routes.WORLD_SIZE, expert)
            awaited = routes.await_new(awaited, slot, deadline)  # wait [Y]
            first = uniform(routes.of_group(RECV_ROW, group))
            loaded, ticket = ring.load_tile(
                self.received_desc, self.w_desc, first + row, w_col, work, loaded,
                scheduler.words, w_row,
            )  # fmt: skip
        return loaded, ticket, awaited


@aggregate
class StoredGroups:
    """Where the store warp puts tiles: in y [capacity, N], a group's behind the one before."""

    y: Pointer
    y_desc: Descriptor
    routes: Routes
    sizes: Sizes

    @gluon.jit
    def store(self, place, grid, staging, finished):
        sizes = self.sizes
        tile = self.routes.locate(place, grid.columns, sizes.GROUP_M, sizes.BLOCK_M)
        first = self.routes.of_group(RECV_ROW, tile.group).to(gl.int64)
        mbarrier.wait(staging.full, finished & 1)
        store_clipped(self.y + first * sizes.N, tile, staging.tile, sizes, self.y_desc)
        complete_tma_stores()
        mbarrier.arrive(staging.empty, count=1)


# numbers that change from call to call must not compile a kernel each
@gluon.jit(do_not_specialize=["rank", "epoch", "timeout_ns", "capacity", "w_first", "w_pitch"])
def hopper_a2a_gemm_kernel(
    x_desc, received_desc, w_desc, y_desc, x, y, kept, routes, pointers, pad, pad_pointers, status,
    work_words, rank, epoch, timeout_ns: tl.int64, capacity, w_first, w_pitch, N, K,
    CONFIG: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = y_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = y_desc.block_type.shape[1]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    sizes = Sizes(
        rank, capacity, N, K, CONFIG.WORLD_SIZE, CONFIG.GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K
    )
    signals = Signals(pad, status, epoch, timeout_ns)
    routing = Routes(
        routes, pointers, pad_pointers, signals, rank, CONFIG.WORLD_SIZE, CONFIG.EXPERTS,
        CONFIG.PER_SIGNAL, CONFIG.BLOCK_G, CONFIG.HEADER,
    )  # fmt: skip
    columns = gl.cdiv(N, BLOCK_N)
    count = gl.load(routing.word(RECV_TILES)) * columns
    tiles = whole_tiles(count, gl.num_programs(0))
    operands = RoutedRows(x_desc, received_desc, w_desc, w_first, w_pitch, routing, sizes)
    targets = StoredGroups(y, y_desc, routing, sizes)
    moved = TravellingRows(
        x, kept, y, received_desc, routing, capacity, N, K, CONFIG.ROWS, BLOCK_M, CONFIG.KEEP
    )
    run_roles(operands, targets, moved, x_desc, w_desc, y_desc, tiles, work_words, True, CONFIG)


def a2a_gemm(
    x: Tensor, received: Tensor, w: ExpertWeights, kept: Tensor, routes: Tensor, about: ExpertCall
) -> Tensor:
    """As `a2a_gemm.a2a_gemm`, for what `hopper.gemm.refuses_experts` does not refuse.

    `received` [capacity, K] are the rows of this rank's region. The rows that came are copied to
    `kept`, unless it is empty: [capacity, K] or [0, K].
    """
    tile, layout, N = about.tile, about.layout, w.columns(about.layout)
    capacity, K = received.shape
    y = x.new_empty(capacity, N)
    described = descriptors.described
    launch_kernel(
        hopper_a2a_gemm_kernel, launch.persistent_grid(x.device, about.most_tiles(N)), tile,
        (
            described(x if len(x) else received, tile.block_m, tile.block_k),
            described(received, tile.block_m, tile.block_k),
            descriptors.described_w(w.rows(), layout, tile.block_k, tile.block_n),
            described(y, tile.block_m, tile.block_n),
            x, y, kept if len(kept) else y, routes, *about.call.tensors,
            about.call.channel.work_counter,
        ),
        (*about.call.numbers, capacity, w.first, w.pitch), (N, K),
        CONFIG=expert_config(about, len(kept) > 0),
    )  # fmt: skip
    return y
