"""What the calls of a run were, over all of its ranks. Torch and Triton only in ranks."""

from __future__ import annotations

from collections import Counter
from typing import IO, Any

from flux_megatron.lab.train.config import TrainConfig


def counts_of_all_ranks(config: TrainConfig, eligible: int) -> dict[str, Any]:
    """Sums over all ranks, each of which has made `eligible` calls. Collective."""
    import torch.distributed as dist

    from flux_megatron.overlap.report import Report, report

    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, report())
    calls = sum((Counter(rank.calls) for rank in ranks), Counter())
    fallbacks = sum((Counter(rank.fallbacks) for rank in ranks), Counter())
    return counts(config, Report(calls, fallbacks, 0), eligible * len(ranks))


def counts(config: TrainConfig, found: Any, eligible: int) -> dict[str, Any]:
    """`silent`: how many of the eligible calls neither overlapped nor gave a reason. A `sequential`
    plan is a reason where plans are chosen, or where it is the run's strategy.
    """
    if config.layers != "flux" or config.parallel.tp == 1:
        eligible = 0
    silent = eligible - found.overlapped - sum(found.fallbacks.values())
    if config.strategy in ("auto", "sequential"):
        silent -= found.chosen_sequential
    return {
        "calls": {" ".join(key): n for key, n in sorted(found.calls.items())},
        "fallbacks": {": ".join(key): n for key, n in sorted(found.fallbacks.items())},
        "overlapped": found.overlapped,
        "chosen_sequential": found.chosen_sequential,
        "eligible": eligible,
        "silent": silent,
    }


def show(title: str, facts: dict[str, Any], stream: IO[str] | None = None) -> None:
    """A line each."""
    values = {name: f"{v:.6g}" if isinstance(v, float) else v for name, v in facts.items()}
    lines = [f"  {name.replace('_', ' ')}: {value}" for name, value in values.items()]
    print("\n".join([title, *lines]), file=stream, flush=True)
