"""Beyond 32 bits: offsets in large shards, slots that small calls leave alone for 2**31 calls, and
logs of as many calls.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from cases import Case, check
from ranks import DEVICE, here, on_cpu_ranks, on_device_ranks

from flux_megatron import errors
from flux_megatron.kernels.portable.gemm_tile import gemm_tile, store_tile
from flux_megatron.overlap.gather import add_gather
from flux_megatron.problem import Plan, Tile
from flux_megatron.symm import call_log, enqueue, signals
from flux_megatron.symm.channel import REFRESH_EVERY
from flux_megatron.symm.program import CallProgram
from flux_megatron.symm.workspaces import workspace

LARGE = (2**20 // 8 + 8, 16384)  # a shard of 2**20 rows over 8 ranks: beyond 2**31 elements
SHARD_BYTES = 2 * LARGE[0] * LARGE[1]


def pushes(
    shape: tuple[int, int], world_size: int, comm_rows: int, part_columns: int = 0
) -> list[tuple[int, int, list[int]]]:
    """Of rank 1's shard: the peer, and how far from the beginning of its region, each with the
    offset in the shard, the bytes, and the rows and pitch of parts of K.
    """
    space = SimpleNamespace(rank=1, world_size=world_size, timeout_ns=1, mailboxes=False)
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    p = CallProgram(space, Plan("hopper"), x, None, None, "", caller_steps=True)
    gather = add_gather(p, p.x, comm_rows, part_columns=part_columns)
    ((_, _), (_, (fork, *steps)), _) = p.segments[0]
    assert fork.method == "fork"
    found, signals = [], set()
    for push, signal in zip(steps[::2], steps[1::2], strict=True):
        to, (register, offset), *numbers = push.operands
        assert push.method == ("copy_rows" if part_columns else "copy")
        assert signal.method == "signal"
        assert register == enqueue.X.register
        peer = to.register - gather.channel.first
        assert signal.operands[0].register == gather.channel.first + world_size + peer
        signals.add(signal.operands[0])
        found.append((peer, to.add, [offset, *(one.add for one in numbers)]))
    assert len(signals) == len(found) == (world_size - 1) * len(gather.comm_tiles)
    return found


M_SHARD, K = LARGE


@pytest.mark.parametrize(
    ("comm_rows", "part_columns", "strides", "whole"),
    [(5000, 0, [], SHARD_BYTES), (0, K // 3, [M_SHARD, 2 * K], 2 * K)],
)
def test_pushes_of_a_large_shard(comm_rows, part_columns, strides, whole):
    """They cover the shard, each behind the one before, with offsets beyond 2**32 bytes; or each
    takes the next columns of every row, and its rows lie as far apart as those of x.
    """
    end = 0
    assert SHARD_BYTES > 2**32
    for peer, destination, (offset, size_bytes, *rest) in pushes(LARGE, 2, comm_rows, part_columns):
        assert (offset, rest) == (end, strides)
        assert (peer, destination) == (0, SHARD_BYTES + end), "rank 1's rows at rank 0"
        end += size_bytes
    assert end == whole


def test_every_rank_gets_its_first_part_before_any_gets_its_second():
    order = [(numbers[0], peer) for peer, _, numbers in pushes((64, 96), 4, 0, 32)]
    assert order == [(offset, peer) for offset in (0, 64, 128) for peer in (0, 3, 2)]


@triton.jit
def last_tile_kernel(x, w, y, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """The tile at the end of x [M, K] and of y [M, N]."""
    acc = gemm_tile(x, w, M - BM, N - BN, M, N, K, BM, BN, BK, False, False)
    store_tile(y, acc, M - BM, N - BN, M, N, BM, BN, False)


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="the memory is the host's")
def test_tiles_beyond_2_31_elements():
    """Rows at the end of x, of w and of y lie where 32-bit offsets would be negative."""
    M, N, K = 2**15 + 16, 2**16 + 16, 2**16
    assert min((M - 16) * K, (N - 16) * K, (M - 16) * N) >= 2**31
    # zeros of numpy, whose pages the machine has only where they are written
    x, w, y = (torch.from_numpy(np.zeros(s, dtype=np.float16)) for s in ((M, K), (N, K), (M, N)))
    x[-16:, -16:] = torch.arange(16, dtype=torch.float16)[:, None]
    w[-16:, -16:] = torch.eye(16, dtype=torch.float16)
    last_tile_kernel[(1,)](x, w, y, M, N, K, BM=16, BN=16, BK=4096)
    assert torch.equal(y[-16:, -16:], x[-16:, -16:])


@pytest.mark.parametrize(
    ("pattern", "calls"),
    [("ag_gemm", 2**31 - 1), ("gemm_rs", 2**31), ("ag_gemm", 2**31 + 1), ("gemm_rs", 2**32 + 1)],
)
@on_device_ranks(2)
def test_slots_unused_for_2_31_calls_announce_nothing(rank, pattern, calls):
    """Three communication tiles a call, one for very long, and three again, which come late."""
    fine, coarse = (
        Case(pattern, 20, 5, 4, plan=Plan("fused", rows, Tile(16, 16, 16))) for rows in (7, 20)
    )
    check(fine)
    channels = workspace(dist.group.WORLD, here()).channels
    channel, refreshed = channels["gather" if pattern == "ag_gemm" else "scatter"], []
    refresh = channel.refresh
    channel.refresh = lambda: (refreshed.append(channel.epoch), refresh())
    first = channel.epoch
    while channel.epoch < first + calls:
        # as many calls of one tile as lead to the next refresh, or to the last call
        end = min(first + calls, (channel.epoch // REFRESH_EVERY + 1) * REFRESH_EVERY - 1)
        if end == channel.epoch:
            check(coarse)
            continue
        dist.barrier()
        for source in range(2):
            channel._pads[rank][signals.slot(source, 0)] = signals.as_int32(end)
        channel.epoch = end
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
    announced = channel._pads[rank][signals.slot(1 - rank, 2)].item()
    stale = signals.reached(announced, signals.as_int32(channel.epoch + 1))
    dist.barrier()  # before the other rank's next call writes there
    check(fine)
    assert not stale
    assert len(refreshed) == (first + calls) // REFRESH_EVERY


@pytest.mark.parametrize("start", [0, 2**31 - 2500, 2**32 - 2500])
@on_cpu_ranks(2)
def test_a_log_of_2_31_calls_still_compares(rank, start):
    """Five thousand calls around call `start`, then one that differs."""
    log = call_log.CallLog(dist.group.WORLD)
    log._count, log._compared = start, [start] * 2
    for place in range(call_log.ENTRIES):  # what the calls before have left
        log._rings[rank][place] = start % 2**31 << 32
    dist.barrier()
    for number in range(5000):
        log.note(f"kind {number % 3}")
        if number % 1000 == rank:
            dist.barrier()
    compared = log._compared[1 - rank] > start + 2000
    dist.barrier()
    log._write("this" if rank else "that")
    dist.barrier()
    last = f"call {start + 5001} of rank {rank} is {'this' if rank else 'that'}"
    with pytest.raises(errors.ProblemMismatch, match=last):
        log.note("kind 0")
    assert compared
