"""Where signals lie and how epochs compare.

A pad holds one int32 slot for each (source rank, communication tile). A slot only ever receives the
epoch of the call whose data has arrived; nobody resets it. Epochs wrap around at 2**32 and are
compared by their difference.
"""

from __future__ import annotations

MAX_COMM_TILES = 64  # communication tiles of one shard

# words of a status record: what the first wait that ran out of time was waiting for
STATUS_TRIPPED, STATUS_SLOT, STATUS_EXPECTED, STATUS_SEEN = range(4)
STATUS_WORDS = 4


def slot(source: int, comm_tile: int) -> int:
    """The slot in which rank `source` announces its communication tile."""
    return source * MAX_COMM_TILES + comm_tile


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
