"""FLUX: communication tiles inside one GEMM kernel. AG+GEMM waits per tile in the prologue, GEMM+RS
scatters in the epilogue.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from flux_megatron.kernels import ag_gemm as ag_gemm_kernels
from flux_megatron.kernels import gemm_rs as gemm_rs_kernels
from flux_megatron.kernels import hopper_gemm, launch
from flux_megatron.kernels.sizes import next_power_of_2
from flux_megatron.overlap import transfer
from flux_megatron.overlap.phase import phase
from flux_megatron.patterns import COLUMN, ROW, Pattern
from flux_megatron.problem import Plan, Problem, Tile
from flux_megatron.scaling import Scaling, result_dtype
from flux_megatron.symm.recording import lend
from flux_megatron.symm.signals import as_int32, comm_rows_at_least
from flux_megatron.symm.workspace import Workspace

PATTERNS = (COLUMN, ROW, Pattern.GEMM_AR)
NEEDS_SYMMETRIC_MEMORY = True
RECORDABLE = (COLUMN, ROW)


def supports(problem: Problem) -> str | None:
    """Why this strategy cannot run the problem, or None."""
    return transfer.unequal_shards(problem) or launch.supports_scaled(problem)


def default_plan(problem: Problem) -> Plan:
    """One communication tile a shard, and a tile that suits the device."""
    if problem.device == "cpu":
        return Plan("fused", tile=_interpreted_tile(problem))
    return Plan("fused", tile=_compiled_tile(problem))


def candidates(problem: Problem) -> list[Plan]:
    """Plans worth measuring: other tiles and groupings of rows, and finer communication tiles."""
    default = default_plan(problem)
    if problem.device == "cpu" or problem.dtype == "float32":
        return [default]
    if hopper_gemm.supports(problem) is None:  # the variants of `hopper` are faster
        return [default]
    tma = _tma(problem)
    tiles = [
        default.tile,
        replace(default.tile, group_m=16),
        Tile(block_m=128, block_n=128, group_m=8, num_warps=8, num_stages=4, tma=tma),
        Tile(block_m=64, block_n=256, group_m=8, num_warps=4, num_stages=3, tma=tma),
        Tile(block_m=64, block_n=128, group_m=8, num_warps=4, num_stages=4, tma=tma),
    ]
    halves = problem.M_shard // 2 if problem.M_shard >= 512 else 0
    return [Plan("fused", rows, tile) for rows in dict.fromkeys((0, halves)) for tile in tiles]


def _clamped(size: int, smallest: int, largest: int) -> int:
    return max(smallest, min(largest, next_power_of_2(size)))


def _tile_for(plan: Plan, scaling: Scaling | None) -> Tile:
    """The plan's, but that tensor cores multiply 32 or more of K in FP8."""
    least = 32 if scaling else 0
    return plan.tile if plan.tile.block_k >= least else replace(plan.tile, block_k=least)


def _interpreted_tile(problem: Problem) -> Tile:
    """Few large tiles: the interpreter takes as long for a small one."""
    return Tile(
        block_m=_clamped(problem.M_shard, 16, 256),
        block_n=_clamped(problem.N_local, 16, 256),
        block_k=_clamped(problem.K_local, 16, 256),
    )


def _compiled_tile(problem: Problem) -> Tile:
    if problem.dtype == "float32":  # full-precision dots run on CUDA cores: small tiles
        return Tile(block_m=64, block_n=64, block_k=32, num_warps=4)
    if problem.M_shard <= 64:
        return Tile(block_m=64, block_n=128, block_k=64, num_warps=4, tma=_tma(problem))
    if problem.scaled:  # as many bytes of K; addresses of x and w are whole units, TMA can read
        return Tile(block_m=128, block_n=128, block_k=128)
    if _tma(problem):
        # with three stages 213,016 bytes of shared memory, of 232,448 (sm_90, triton 3.7.1)
        return Tile(block_m=128, block_n=256, block_k=64, tma=True)
    return Tile(block_m=128, block_n=128, block_k=64)


def _tma(problem: Problem) -> bool:
    """TMA needs Hopper and rows of whole 16-byte units in every operand."""
    aligned = problem.K_local % 8 == 0 and problem.N_local % 8 == 0
    return aligned and torch.cuda.get_device_capability() >= (9, 0)


def start_gather(x: Tensor, plan: Plan, workspace: Workspace) -> transfer.Gather:
    """All-gather x [M_shard, K] in the background; `complete` gives [M, K]."""
    return transfer.start_gather(x, workspace, plan.comm_rows)


def ag_gemm(
    x: Tensor, w: Tensor, bias: Tensor | None, layout: str, plan: Plan, workspace: Workspace,
    consume: Callable[[Tensor], None] | None, scaling: Scaling | None = None,
) -> Tensor:  # fmt: skip
    """all_gather(x) @ w + bias; `consume` is called with the gathered rows while they are valid."""
    local_copy = "engine" if consume is not None else "nobody"
    gather = transfer.start_gather(x, workspace, plan.comm_rows, local_copy=local_copy)
    with phase("ag_gemm kernel"):
        y = ag_gemm_kernels.ag_gemm(
            x, gather.gathered, w, bias,
            pad=gather.call.pads[gather.call.rank],
            status=gather.call.status,
            work_counter=gather.call.channel.work_counter,
            rank=gather.call.rank,
            epoch=as_int32(gather.call.epoch),
            timeout_ns=gather.call.timeout_ns,
            comm_rows=gather.comm_rows,
            layout=layout,
            tile=_tile_for(plan, scaling),
            scaling=scaling,
        )  # fmt: skip
    if consume is not None:
        lend(consume, gather.complete())
    gather.close(by_kernel=True)
    return y


def start_gemm_rs(
    x: Tensor, w: Tensor, layout: str, plan: Plan, workspace: Workspace,
    scaling: Scaling | None = None,
) -> transfer.ReduceScatter:  # fmt: skip
    """x @ w, each tile stored at its owner; `finish` gives y [M_shard, N]."""
    world_size = workspace.world_size
    N = w.shape[0] if layout == "nt" else w.shape[1]
    M_shard = x.shape[0] // world_size
    comm_rows = comm_rows_at_least(M_shard, plan.comm_rows)
    dtype = result_dtype(x, scaling)
    size_bytes = world_size * M_shard * N * dtype.itemsize
    call = transfer.begin(workspace, transfer.SCATTER, size_bytes)
    received = call.view(call.rank, (world_size, M_shard, N), dtype)
    with phase("gemm_rs kernel"):
        gemm_rs_kernels.gemm_rs(
            x, w, received=received,
            received_pointers=call.pointers,
            pad_pointers=call.pad_pointers,
            counters=call.channel.tile_counters,
            work_counter=call.channel.work_counter,
            rank=call.rank,
            world_size=world_size,
            epoch=as_int32(call.epoch),
            comm_rows=comm_rows,
            layout=layout,
            tile=_tile_for(plan, scaling),
            scaling=scaling,
        )  # fmt: skip
    return transfer.ReduceScatter(workspace, call, received, comm_rows)


def start_gemm_ar(
    x: Tensor, w: Tensor, layout: str, plan: Plan, workspace: Workspace
) -> transfer.AllReduce:
    """x @ w scattered as above, its sums gathered in the background; `finish` gives y [M, N]."""
    sums = start_gemm_rs(x, w, layout, plan, workspace).finish()
    return transfer.AllReduce(transfer.start_gather(sums, workspace, 0))
