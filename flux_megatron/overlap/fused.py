"""FLUX: communication tiles inside one GEMM kernel. AG+GEMM waits per tile in the prologue, GEMM+RS
scatters in the epilogue.

    AG+GEMM, rank r
    caller's stream   one kernel: tiles of local rows | each tile of r+1: wait [A] of its rows | ...
    copy engine       x to r-1 tile by tile, a signal [A] behind each | to r-2 | ...

    GEMM+RS, rank r
    caller's stream   one kernel: tiles of r+1 are stored there, signal [B] | of r+2 | ... | of r
                      one kernel: wait [B] of all, sum
"""

from __future__ import annotations

from dataclasses import replace

import torch

from flux_megatron.kernels import launch, shared_memory
from flux_megatron.kernels.hopper import gemm as hopper_gemm
from flux_megatron.kernels.portable import ag_gemm as ag_gemm_kernels
from flux_megatron.kernels.portable import gemm_rs as gemm_rs_kernels
from flux_megatron.kernels.sizes import next_power_of_2
from flux_megatron.overlap import transfer
from flux_megatron.overlap.gather import add_gather, all_reduced
from flux_megatron.patterns import COLUMN, ROW, Pattern
from flux_megatron.problem import Plan, Problem, Tile
from flux_megatron.scaling import Scaling, result_dtype
from flux_megatron.symm.program import Builder, CallProgram
from flux_megatron.symm.signals import comm_rows_at_least
from flux_megatron.symm.steps import Slot

NEEDS_SYMMETRIC_MEMORY = True


def supports(problem: Problem) -> str | None:
    """Why this strategy cannot run the problem, or None."""
    return transfer.unequal_shards(problem) or launch.supports_scaled(problem)


def default_plan(problem: Problem) -> Plan:
    """One communication tile a shard, and a tile that suits the device."""
    tile_of = _interpreted_tile if problem.device == "cpu" else _compiled_tile
    return Plan("fused", tile=tile_of(problem))


def why_not(problem: Problem, plan: Plan) -> str | None:
    """Why no call of the problem has this plan, or None."""
    return shared_memory.refuses(problem, plan.tile, stores_by_tma=True)


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


def _tile_for(plan: Plan, scaling: Scaling | None) -> Tile:
    """The plan's, but that tensor cores multiply 32 or more of K in FP8."""
    least = 32 if scaling else 0
    return plan.tile if plan.tile.block_k >= least else replace(plan.tile, block_k=least)


def _interpreted_tile(problem: Problem) -> Tile:
    """Few large tiles: the interpreter takes as long for a small one."""
    sizes = (problem.M_shard, problem.N_local, problem.K_local)
    block_m, block_n, block_k = (max(16, min(256, next_power_of_2(size))) for size in sizes)
    return Tile(block_m, block_n, block_k)


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


def _ag_gemm(p: CallProgram) -> Slot:
    local_copy = "engine" if p.caller_steps else "nobody"
    gather = add_gather(p, p.x, p.plan.comm_rows, local_copy=local_copy)
    with p.phase("ag_gemm kernel"):
        y = ag_gemm_kernels.ag_gemm(
            p.x, gather.gathered, p.w, p.bias, **transfer.waits(gather.channel),
            work_counter=gather.channel.fixed("work_counter"), rank=p.rank,
            comm_rows=gather.comm_rows, layout=p.layout, tile=_tile_for(p.plan, p.scaling),
            scaling=p.scaling,
        )  # fmt: skip
    gather.bring()
    if p.caller_steps:
        p.caller_step(gather.complete())
    gather.close(by_kernel=True)
    return y


def _sums(p: CallProgram) -> transfer.ReduceScatter:
    """Each tile of x @ w is stored at its owner."""
    M_shard, dtype = len(p.x) // p.world_size, result_dtype(p.x, p.scaling)
    comm_rows = comm_rows_at_least(M_shard, p.plan.comm_rows)
    channel = p.channel(transfer.SCATTER, len(p.x) * p.N * dtype.itemsize)
    received = channel.region((p.world_size, M_shard, p.N), dtype)
    with p.phase("gemm_rs kernel"):
        gemm_rs_kernels.gemm_rs(
            p.x, p.w, received=received, received_pointers=channel.fixed("pointers"),
            pad_pointers=channel.fixed("pad_pointers"), counters=channel.fixed("tile_counters"),
            work_counter=channel.fixed("work_counter"), rank=p.rank, world_size=p.world_size,
            epoch=channel.epoch, comm_rows=comm_rows, layout=p.layout,
            tile=_tile_for(p.plan, p.scaling), scaling=p.scaling,
        )  # fmt: skip
    return transfer.ReduceScatter(channel, received, comm_rows)


def _gemm_rs(p: CallProgram) -> Slot:
    sums = _sums(p)
    p.caller_step()
    return sums.finish()


def _gemm_ar(p: CallProgram) -> Slot:
    return all_reduced(p, _sums(p).finish())


BUILDERS: dict[Pattern, Builder] = {COLUMN: _ag_gemm, ROW: _gemm_rs, Pattern.GEMM_AR: _gemm_ar}
