"""`flux-megatron tune --experts`: measure the strategies of a model's experts ahead of a run."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from rich.console import Console

from flux_megatron import settings
from flux_megatron.errors import BadInput
from flux_megatron.expert_parallel import plans, tune
from flux_megatron.expert_parallel.plans import ExpertProblem
from flux_megatron.tune_command.measure import join, table
from flux_megatron.tuning import plan_cache, tuner


def problems(
    hidden: int, ffn: int, experts: int, topk: int, tokens: int, ep: int, dtype: str, device: str,
    gated: bool = False,
) -> list[ExpertProblem]:  # fmt: skip
    """A layer's two operations and their dgrads, with the capacity that `--flux-experts` asks for:
    each of `tokens` of each rank chooses an expert once at most.

    `BadInput` if the ranks cannot share the experts.
    """
    if ep < 2 or experts % ep:
        raise BadInput(f"{experts} experts over {ep} ranks given, as many on 2 or more expected")
    if not 0 < topk <= experts or min(hidden, ffn, tokens) < 1:
        raise BadInput(
            f"hidden {hidden}, ffn {ffn}, tokens {tokens}, topk {topk} of {experts} experts given, "
            "sizes above 0 and at most all experts expected"
        )
    local, fc1 = experts // ep, 2 * ffn if gated else ffn
    capacity = max(tokens * min(topk, local) * ep, tokens * topk)
    shapes = (
        ("a2a_gemm", fc1, hidden, "nt"), ("gemm_a2a", hidden, ffn, "nt"),
        ("gemm_a2a", hidden, fc1, "nn"), ("a2a_gemm", ffn, hidden, "nn"),
    )  # fmt: skip
    return [
        ExpertProblem(operation, capacity, local, N, K, dtype, ep, layout, device)
        for operation, N, K, layout in shapes
    ]


def run(wanted: Sequence[ExpertProblem], again: bool) -> None:
    """Measure what has not been measured here, on every rank of a torchrun job. Rank 0 shows tables
    and writes the user's cache. `again` measures what is known too.
    """
    device = join(wanted[0].device)
    group = dist.group.WORLD
    assert group is not None, "joined above"
    console = Console(quiet=dist.get_rank() != 0)
    try:
        for problem in wanted:
            entry = None if again else plans.kept(problem, device)
            known = tuner.leaders(group, entry is not None)
            if not known:
                entry = tune.measure(problem, group, device)
            if dist.get_rank() != 0:
                continue
            if entry is None:
                console.print(f"[red]{problem}: no memory, or `sequential` failed: not kept[/red]")
                continue
            if not known:
                plan_cache.keep(entry, settings.get().cache, device)
            console.print(table(entry, known))
    finally:
        dist.destroy_process_group()
