"""Who pushes a shard of GEMM+RS by `hopper` to its owner, and in how many communication tiles: the
SMs, as soon as a tile is made, or a copy engine. The cost model reads it too, without torch.
"""

from __future__ import annotations

from flux_megatron.problem import COMM_TILES_MAX, Problem

BY_SM_BYTES = 8 << 20  # that a rank sends to each peer; more goes by copy engine
# GEMMs of FP8 are half as long, and stores of the SMs hold them up. With a fast accumulator 4 MiB
# take 71 and 191 us by SMs, 82 and 203 by copy engines, with a split one 68 and 205, or 65 and 200;
# 8 MiB 70, 114 and 180, or 78, 105 and 171. Under contention SMs are never slower, in four shapes
# (2 x H200, 2026-11-27, h200x2/fp8_pushes.jsonl).
FP8_BY_SM_BYTES = 4 << 20
# In how many communication tiles copy engines push a shard of more than so many bytes. Where K is
# short the link ends behind the GEMM, and what is multiplied behind the last arrival is one of
# these. Over two ranks four in place of two take .81 to .95 of the time in 13 of 45 races, all with
# K up to 2,048 or 4,096 of FP8, and .98 to 1.01 in the others; eight of more than 64 MiB .95 to
# 1.00 of four. Below 16 MiB four take 1.04 to 1.14 of two. With a split accumulator two of 8 MiB
# take .91 of one (alone and beside others, 2 x H200, 2026-11-28, h200x2/pushes.jsonl). Over more
# ranks there are two at most until that is measured.
PUSHES = ((64 << 20, COMM_TILES_MAX), ((16 << 20) - 1, 4), (BY_SM_BYTES, 2))
# The SMs push more than BY_SM_BYTES where K is short, bytes times K up to this: .87 to .99 of the
# copy engines' time in four shapes, .73 beside others (one, over four ranks), else 1.00 to 1.12
# (16; 2 and 4 x H200, 2026-11-28, pushes.jsonl). Up to LATE_LINK_K they are tried anyway.
BY_SM_BYTES_K = 1 << 35
LATE_LINK_K = 2048

# Of GEMM+AR whose sums copy engines push, too: shards of more bytes in eight communication tiles,
# which take .97 to .98 of the time of four in three shapes, and 1.04 to 1.07 in three with less (by
# mailboxes, two ranks with half of an H200 each, 2026-12-01, h200/checks.jsonl).
SUMS_BYTES = 24 << 20
# By so many waves of tiles local ones follow those that peers add to them: one for these to be
# made, the others to travel.
BEHIND_WAVES = 2.5

Push = tuple[str, int]  # the transport of a plan, and communication tiles of a shard
BY_SM: Push = ("sm", COMM_TILES_MAX)  # they signal for nothing, a copy engine takes 10 us to begin


def chosen(problem: Problem) -> Push:
    """What is chosen unmeasured."""
    size_bytes = _shard_bytes(problem)
    if size_bytes <= (FP8_BY_SM_BYTES if problem.scaled else BY_SM_BYTES):
        return BY_SM
    if not problem.scaled and size_bytes * problem.K_local <= BY_SM_BYTES_K:
        return BY_SM
    fewest, most = (2 if problem.split_accumulator else 1), COMM_TILES_MAX
    if problem.world_size > 2:
        fewest, most = 1, 2
    return "copy_engine", min(max(_copies(size_bytes), fewest), most)


def others(problem: Problem) -> list[Push]:
    """What is worth a measurement besides."""
    size_bytes = _shard_bytes(problem)
    engines: list[Push] = [("copy_engine", max(2, _copies(size_bytes)))]
    if problem.scaled:
        counts = dict.fromkeys((1, 2, _copies(size_bytes)))
        return [BY_SM, *(("copy_engine", count) for count in counts)]
    # 2048 x 5120 x 12800, of 10 MiB, takes 386 us by SMs, 403 by copy engines; 2304 x 5120 x 13824,
    # of 11, 484 and 475 (2 of 4 x H200, 2026-11-27, h200x2/trees.jsonl)
    close = size_bytes <= 2 * BY_SM_BYTES or problem.K_local <= LATE_LINK_K
    return [BY_SM, *engines] if close else engines


def of_sums(problem: Problem) -> list[Push]:
    """The same of GEMM+AR whose sums copy engines push, too."""
    counts = (8, 4) if _shard_bytes(problem) > SUMS_BYTES else (4, 8)
    return [("engines", count) for count in counts]


def most_comm_tiles(world_size: int) -> int:
    """Of a shard: a CTA remembers in 64 bits what all ranks have sent."""
    return 64 // world_size


def _shard_bytes(problem: Problem) -> int:
    """Of results, which have 16 bits."""
    return problem.M_shard * problem.N_local * 2


def _copies(size_bytes: int) -> int:
    return next((count for above, count in PUSHES if size_bytes > above), 1)
