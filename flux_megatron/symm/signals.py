"""The layout of signals, and the comparison of epochs.

A pad holds one int32 slot for each (source rank, communication tile), then one for each source's
entries into captured calls. A slot receives the epoch of the call whose data has arrived. The
epochs of eager calls count up, and nobody resets their slots. Captured calls have a pad of their
own and one epoch, and each resets its slots when it begins. Epochs wrap around at 2**32, and their
difference compares them.
"""

from __future__ import annotations

MAX_COMM_TILES = 64  # communication tiles of one shard
SPLIT_TILES = 1024  # that a kernel may have, cut along K
PARTIAL_COUNTERS = 2 * SPLIT_TILES  # for each of two warp groups
# of a kernel's tile scheduler: the work counter, then a claim for each CTA's first work tile
WORK_CLAIMS = 4
WORK_WORDS = 512
CAPTURED_EPOCH = 1  # of every captured call, because a replay repeats it

# words of a status record: whether waits of GPUs give up; the slot, expected and seen epoch of the
# first one that ran out of time
STATUS_OVER, STATUS_SLOT, STATUS_EXPECTED, STATUS_SEEN = range(4)
STATUS_PAD_LOW, STATUS_PAD_HIGH = 4, 5  # the two words of the pad's address
STATUS_TRIPPED = 6  # why, written last
STATUS_WORDS = 7
# what the last word holds: a wait has run out of time, a kernel has refused its numbers, or the
# host has learned that another rank makes another call
STATUS_LATE, STATUS_REFUSED, STATUS_MISMATCH = 1, 2, 3
# the slot of a refusal is REFUSED_KINDS * rank + its kind
REFUSED_CAPACITY, REFUSED_COUNTS, REFUSED_CHOICES = range(3)
REFUSED_KINDS = 3
# Turns of a wait on a GPU between two looks at the clock and at the status record in host memory.
# CTAs that look at once queue for it, more than a microsecond each, so looks must be rare beside
# what ranks are apart in a good run. 4,096 turns take some milliseconds.
LOOK_EVERY = 4096


def slot(source: int, comm_tile: int) -> int:
    """The slot in which rank `source` announces its communication tile."""
    return source * MAX_COMM_TILES + comm_tile


def slot_bytes(source: int, comm_tile: int) -> int:
    """How far the slot lies behind the first of its pad."""
    return 4 * slot(source, comm_tile)


def entry_slot(source: int, world_size: int) -> int:
    """The slot in which rank `source` announces that it has entered a captured call."""
    return world_size * MAX_COMM_TILES + source


def pad_words(world_size: int) -> int:
    """The slots of a pad, rounded up so that the next pad begins at a multiple of 16 bytes."""
    return -(-entry_slot(world_size, world_size) // 4) * 4


def describe_slot(number: int, world_size: int) -> str:
    """What the slot of this number announces, for messages."""
    source, comm_tile = divmod(number, MAX_COMM_TILES)
    if source < world_size:
        return f"communication tile {comm_tile} of rank {source}"
    return f"rank {comm_tile} to begin the same captured call"


def refused(number: int, expected: int, seen: int) -> str:
    """What a kernel has refused, in words."""
    rank, kind = divmod(number, REFUSED_KINDS)
    if kind == REFUSED_CAPACITY:
        return f"rank {rank} receives {seen} rows, capacity for at most {expected} given"
    if kind == REFUSED_CHOICES:
        return f"a token of rank {rank} has chosen {seen} experts, at most {expected} expected"
    if seen == expected:
        return f"the counts of rank {rank} name {seen} rows, and a negative number among them"
    return f"the counts of rank {rank} name {seen} rows, {expected} expected: as many as its x has"


def as_int32(epoch: int) -> int:
    """The epoch as the signed 32-bit word that is written and compared."""
    return (epoch + 2**31) % 2**32 - 2**31


def reached(seen: int, epoch: int) -> bool:
    """Whether a slot that holds `seen` announces `epoch` or a later one."""
    return as_int32(seen - epoch) >= 0


def comm_rows_at_least(M_shard: int, wanted: int) -> int:
    """Rows of a communication tile: `wanted` (0 = the whole shard), within the number of slots."""
    smallest = -(-M_shard // MAX_COMM_TILES)
    return max(1, smallest, min(wanted or M_shard, M_shard))
