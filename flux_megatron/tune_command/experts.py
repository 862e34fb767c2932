"""`flux-megatron tune --experts`: measure the strategies of a model's experts ahead of a run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from flux_megatron.errors import BadInput
from flux_megatron.expert_parallel import plans, tune
from flux_megatron.expert_parallel.plans import ExpertEntry, ExpertProblem
from flux_megatron.tune_command.measure import joined, measure_all, refuse_lacking


def problems(
    hidden: int, ffn: int, experts: int, topk: int, tokens: int, ep: int, dtype: str, device: str,
    gated: bool = False,
) -> list[ExpertProblem]:  # fmt: skip
    """A layer's two operations and their dgrads, with the capacity that `--flux-experts` asks for:
    each of `tokens` of each rank chooses an expert once at most.

    `BadInput` if the ranks cannot share the experts, or a token chooses more than there are.
    """
    if experts % ep:
        raise BadInput(f"{experts} experts over {ep} ranks given, as many on each expected")
    if topk > experts:
        raise BadInput(f"topk {topk} of {experts} experts given, at most all of them expected")
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
    with joined(wanted[0].device) as (group, device):

        def measure(problem: ExpertProblem, watch: object) -> ExpertEntry:
            return tune.measure(problem, group, device)

        find = partial(plans.kept, device=device)
        entries = measure_all(wanted, group, device, again, find, measure)
        refuse_lacking(wanted, entries)
