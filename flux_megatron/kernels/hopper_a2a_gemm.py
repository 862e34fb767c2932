"""`a2a_gemm.py` for Hopper, in Gluon: the same routes and signals, at the speed of a library GEMM.

    producer   draws tiles, those of local groups first, and loads their operands: rows of x, or
               rows that have come, after [Y]
    MMA warps  hand each finished tile to the store warp and go on with the next
    store warp stores a tile in y, no further than the end of its group
    row warps  push rows to other ranks and signal [Y]; then set the rest of y to 0 and copy rows
               that backward needs (`hopper_rows`)

Pushes wait for nobody and no tile makes them wait, so one resident CTA is enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from flux_megatron.kernels import hopper_descriptors, launch
from flux_megatron.kernels.expert_routes import (
    OWN_RECV_TILES,
    RECV_ROW,
    RECV_TILES,
    SEND_ROW,
    experts_per_signal,
    header_bytes,
)
from flux_megatron.kernels.gluon_versions import Descriptor, Pointer, aggregate
from flux_megatron.kernels.hopper_config import Config, common_config
from flux_megatron.kernels.hopper_epilogue import HandedTiles, new_staging_tile
from flux_megatron.kernels.hopper_primitives import complete_tma_stores, uniform
from flux_megatron.kernels.hopper_ring import new_ring
from flux_megatron.kernels.hopper_roles import multiply, produce, store
from flux_megatron.kernels.hopper_routes import Routes, store_clipped
from flux_megatron.kernels.hopper_rows import TravellingRows, send_rows
from flux_megatron.kernels.hopper_scheduler import TileScheduler, new_exchange
from flux_megatron.kernels.hopper_signals import Signals
from flux_megatron.kernels.hopper_split_k import Partials, WorkTiles
from flux_megatron.kernels.hopper_tile_order import Sizes
from flux_megatron.kernels.sizes import cdiv, next_power_of_2
from flux_megatron.kernels.split_k import SplitK
from flux_megatron.kernels.triton_launch import Launcher
from flux_megatron.problem import Tile


@aggregate
class RoutedRows:
    """Operands of the producer warp: x of this rank, rows of others when they have come, and the
    matrices of all experts, one below the other.
    """

    x_desc: Descriptor
    received_desc: Descriptor
    w_desc: Descriptor
    routes: Routes
    sizes: Sizes

    @gluon.jit
    def deadline(self):
        return self.routes.signals.deadline()

    @gluon.jit
    def none_arrived(self):
        return self.routes.signals.epoch * 0 - 1  # no slot

    @gluon.jit
    def load(self, ring, scheduler, grid, work, loaded, arrived, deadline):
        sizes = self.sizes
        routes = self.routes
        group, _, row, n = routes.locate(work.tile, grid.columns, sizes.GROUP_M, sizes.BLOCK_M)
        step = group // routes.EXPERTS
        expert = group % routes.EXPERTS
        w_row, w_col = expert_operand(expert, n * sizes.BLOCK_N, sizes, ring.LAYOUT_NN)
        if step == 0:
            first = uniform(routes.of_group(SEND_ROW, group))
            loaded, ticket = ring.load_tile(
                self.x_desc, self.w_desc, first + row, w_col, work, loaded, scheduler.words, w_row
            )
        else:
            slot = routes.slot_of((routes.rank + step) % routes.WORLD_SIZE, expert)
            arrived = routes.await_new(arrived, slot, deadline)  # wait [Y]
            first = uniform(routes.of_group(RECV_ROW, group))
            loaded, ticket = ring.load_tile(
                self.received_desc, self.w_desc, first + row, w_col, work, loaded,
                scheduler.words, w_row,
            )  # fmt: skip
        return loaded, ticket, arrived


@gluon.jit
def expert_operand(expert, col, sizes, LAYOUT_NN: gl.constexpr):
    """Where column `col` of an expert's matrix lies in those of all experts: the row from which its
    k-tiles count, and its place on the other side. "nt": [E * N, K], else [E * K, N].
    """
    if LAYOUT_NN:
        w_row = expert * sizes.K
        w_col = col
    else:
        w_row = 0
        w_col = expert * sizes.N + col
    return w_row, w_col


@aggregate
class StoredGroups:
    """Where the store warp puts tiles: in y [capacity, N], a group's behind the one before."""

    y: Pointer
    y_desc: Descriptor
    routes: Routes
    sizes: Sizes

    @gluon.jit
    def store(self, tile, grid, staging, finished):
        sizes = self.sizes
        group, count, row, n = self.routes.locate(
            tile, grid.columns, sizes.GROUP_M, sizes.BLOCK_M
        )
        place = self.routes.of_group(RECV_ROW, group).to(gl.int64)
        mbarrier.wait(staging.full, finished & 1)
        store_clipped(
            self.y + place * sizes.N, count, sizes.N, row, n * sizes.BLOCK_N, staging.tile,
            self.y_desc,
        )  # fmt: skip
        complete_tma_stores()
        mbarrier.arrive(staging.empty, count=1)


@dataclass(frozen=True, kw_only=True)
class ExpertConfig(Config):
    EXPERTS: int
    PER_SIGNAL: int
    BLOCK_G: int
    HEADER: int
    ROWS: int
    KEEP: bool = False


def expert_config(
    world_size: int, experts: int, layout: str, tile: Tile, comm_rows: int, keep: bool = False
) -> ExpertConfig:
    """What the two kernels of expert parallelism are compiled for."""
    return ExpertConfig(
        **common_config(world_size, layout, tile, SplitK(0, 0)), EXPERTS=experts,
        PER_SIGNAL=experts_per_signal(experts), BLOCK_G=next_power_of_2(world_size * experts),
        HEADER=header_bytes(world_size, experts), ROWS=comm_rows, KEEP=keep,
    )  # fmt: skip


# numbers that change from call to call must not compile a kernel each
@gluon.jit(do_not_specialize=["rank", "epoch", "timeout_ns", "capacity"])
def hopper_a2a_gemm_kernel(
    x_desc, received_desc, w_desc, y_desc, x, y, kept, routes, pointers, pad, pad_pointers, status,
    work_words, rank, epoch, timeout_ns: gl.int64, capacity, N, K, CONFIG: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = y_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = y_desc.block_type.shape[1]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[CONFIG.NUM_WARPS, 1], instr_shape=[16, BLOCK_N, 16]
    )
    sizes = Sizes(rank, capacity, N, K, CONFIG.WORLD_SIZE, CONFIG.GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K)
    signals = Signals(pad, status, None, epoch, timeout_ns)
    routing = Routes(
        routes, pointers, pad_pointers, signals, rank, CONFIG.WORLD_SIZE, CONFIG.EXPERTS,
        CONFIG.PER_SIGNAL, CONFIG.BLOCK_G, CONFIG.HEADER,
    )  # fmt: skip
    columns = gl.cdiv(N, BLOCK_N)
    count = gl.load(routing.word(RECV_TILES)) * columns
    own = gl.load(routing.word(OWN_RECV_TILES)) * columns
    ctas = gl.num_programs(0)
    tiles = WorkTiles(count, 0, 0, count, CONFIG.EARLY_PARTS, CONFIG.LAST_PARTS, ctas)
    exchange = new_exchange(2)
    ring = new_ring(x_desc, w_desc, CONFIG.STAGES, CONFIG.LAYOUT_NN)
    staging = new_staging_tile(y_desc)
    operands = RoutedRows(x_desc, received_desc, w_desc, routing, sizes)
    epilogue = HandedTiles(staging, sizes, layout)
    targets = StoredGroups(y, y_desc, routing, sizes)
    moved = TravellingRows(
        x, kept, y, received_desc, routing, capacity, N, K, CONFIG.ROWS, BLOCK_M, CONFIG.KEEP
    )
    sums = Partials(work_words, work_words, CONFIG.PARTS_MAX, layout)  # of which there are none
    fence_async_shared()  # TMA arrives at some of the barriers
    gl.warp_specialize(
        [
            (multiply, (epilogue, ring, exchange, tiles, sums, CONFIG.NUM_WARPS)),
            (produce, (operands, ring, exchange, TileScheduler(tiles, work_words, min(ctas, own)))),
            (store, (targets, staging, exchange, tiles)),
            (send_rows, (moved,)),
        ],
        [1, 1, 2],
        [80, 80, 80],
    )


@lru_cache(maxsize=256)
def _launcher(
    world_size: int, experts: int, N: int, K: int, capacity: int, dtype: torch.dtype,
    device: torch.device, layout: str, tile: Tile, comm_rows: int, keep: bool,
) -> Launcher:  # fmt: skip
    most = (cdiv(capacity, tile.block_m) + world_size * experts) * cdiv(N, tile.block_n)
    return Launcher(
        hopper_a2a_gemm_kernel, launch.persistent_grid(device, most), tile, (N, K),
        CONFIG=expert_config(world_size, experts, layout, tile, comm_rows, keep),
    )  # fmt: skip


def a2a_gemm(
    x: Tensor, received: Tensor, w: Tensor, kept: Tensor, routes: Tensor, *, pointers: Tensor,
    pad: Tensor, pad_pointers: Tensor, status: Tensor, work_words: Tensor, rank: int,
    world_size: int, epoch: int, timeout_ns: int, layout: str, tile: Tile, comm_rows: int,
) -> Tensor:  # fmt: skip
    """As `a2a_gemm.a2a_gemm`, for what `hopper_gemm.refuses_experts` does not refuse.

    `received` [capacity, K] are the rows of this rank's region. The rows that came are copied to
    `kept`, unless it is empty: [capacity, K] or [0, K].
    """
    experts, N = w.shape[0], w.shape[1] if layout == "nt" else w.shape[2]
    capacity, K = received.shape
    y = x.new_empty(capacity, N)
    run = _launcher(
        world_size, experts, N, K, capacity, x.dtype, x.device, layout, tile, comm_rows,
        len(kept) > 0,
    )  # fmt: skip
    described = hopper_descriptors.described
    run(
        (
            described(x if len(x) else received, tile.block_m, tile.block_k),
            described(received, tile.block_m, tile.block_k),
            hopper_descriptors.described_w(w.view(-1, w.shape[2]), layout, tile),
            described(y, tile.block_m, tile.block_n),
            x, y, kept if len(kept) else y, routes, pointers, pad, pad_pointers, status,
            work_words,
        ),
        (rank, epoch, timeout_ns, capacity),
    )  # fmt: skip
    return y
