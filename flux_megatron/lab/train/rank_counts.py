"""What the calls of a run were, over all of its ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch.distributed as dist

from flux_megatron.overlap.report import report


def counts_of_all_ranks() -> dict[str, Any]:
    """Sums over all ranks of what each one's report counted. Collective."""
    counts = report()
    mine = (dict(counts.calls), dict(counts.fallbacks), counts.overlapped, counts.chosen_sequential)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    calls: Counter[str] = Counter()
    fallbacks: Counter[str] = Counter()
    for rank_calls, rank_fallbacks, _, _ in ranks:
        calls.update({f"{pattern} {strategy}": n for (pattern, strategy), n in rank_calls.items()})
        fallbacks.update(
            {f"{pattern}: {reason}": n for (pattern, reason), n in rank_fallbacks.items()}
        )
    return {
        "calls": dict(sorted(calls.items())),
        "fallbacks": dict(sorted(fallbacks.items())),
        "overlapped": sum(rank[2] for rank in ranks),
        "chosen_sequential": sum(rank[3] for rank in ranks),
    }


def count_lines(counts: dict[str, Any]) -> list[str]:
    """What is shown of the counts, with `eligible` and `silent` calls; nothing of stock layers."""
    lines = [f"  calls: {call}: {n}" for call, n in counts["calls"].items()]
    lines += [f"  fallback: {reason}: {n}" for reason, n in counts["fallbacks"].items()]
    if counts["eligible"]:
        lines += [
            f"  overlapped / eligible calls: {counts['overlapped']} / {counts['eligible']}",
            f"  sequential by their plan: {counts['chosen_sequential']}",
            f"  silent fallbacks: {counts['silent']}",
        ]
    return lines
