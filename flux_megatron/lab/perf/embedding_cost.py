"""Embedding + All-to-All: the terms of its forward, and what each costs on an H200.

| term | amount | what it is |
| --- | --- | --- |
| entries | entries of all bags of a rank, in thousands | the kernel's own time for an entry |
| row_bytes | bytes of the rows that they name, in kB | reads of the tables |
| pooled_bytes | bytes of the pooled rows, in kB | stores; fused: to peers, and the result's copy |

`unfused` is a lookup, a copy that orders rows for their ranks, an all-to-all, and a copy that puts
the blocks of all ranks together. `fused` is one kernel: slices travel while others are pooled.
"""

from __future__ import annotations

from dataclasses import dataclass

# us of one unit of each term: fitted to docs/results/h200x2/embedding_a2a.jsonl,
# us/thousand entries and us/kB.
LOOKUP = {"entries": 0.2165, "row_bytes": 7.0721e-05, "pooled_bytes": 0.0031162}
FUSED = {"entries": 0.015168, "row_bytes": 0.00030296, "pooled_bytes": 0.0017655}
# The two copies beside the all-to-all together.
LAYOUT_US = 0.0013176  # of a kB of pooled rows


@dataclass(frozen=True)
class Lookup:
    """The bags of one rank: of all samples of the global batch, in its own tables."""

    batch: int
    tables: int
    pooling: float
    dim: int
    element_bytes: int = 4

    @property
    def pooled_bytes(self) -> float:
        return float(self.batch * self.tables * self.dim * self.element_bytes)

    @property
    def terms(self) -> dict[str, float]:
        entries = self.batch * self.tables * self.pooling
        return {
            "entries": entries * 1e-3,
            "row_bytes": entries * self.dim * self.element_bytes * 1e-3,
            "pooled_bytes": self.pooled_bytes * 1e-3,
        }


def fused_us(pooling_us: float, transfer_us: float, slices: int) -> float:
    """One kernel that sends each of `slices` as soon as it is pooled, remote ones first.

    Whichever is longer hides the other but for one slice: the first is pooled before anything
    travels, the last one travels when all are pooled.
    """
    first, last = pooling_us / slices, transfer_us / slices
    return max(pooling_us + last, first + transfer_us)
