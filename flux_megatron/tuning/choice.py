"""Which plan a call gets: the measured one, else the one with the least estimate.

The leader of the group, rank 0, looks it up, and one question through the store brings its answer
to all: that works inside a CUDA graph's capture too, where nothing may be measured.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flux_megatron import settings
from flux_megatron.kernels.sizes import cdiv
from flux_megatron.kernels.split_k import chunk_count, is_ragged
from flux_megatron.overlap import registry, sequential
from flux_megatron.perf import hardware
from flux_megatron.perf.operator_cost import is_one_gemm
from flux_megatron.problem import Plan, Problem, Tile
from flux_megatron.symm.lasting import lasting
from flux_megatron.symm.workspace import Workspace, capturing
from flux_megatron.tuning import environment, estimate, plan_cache, tuner
from flux_megatron.tuning.plan_cache import PlanCache
from flux_megatron.tuning.plan_cost import in_parts
from flux_megatron.tuning.plan_entry import Entry

# What may run beside other kernels without a measurement of that. On 2 x H200 (2026-11-22, N = K =
# 12288, `docs/results/h200x2/beside.jsonl`) `hopper` and `fused` were ahead of NCCL + cuBLAS beside
# an all-reduce at every M from 1024 to 8192; `pipelined` was up to 4 % behind it below 4096. One
# GEMM of it behind a gather was 5 to 12 % ahead in all four cases of M = 64 to 496 (2 x H100,
# 2026-11-25, `docs/results/h100x2/held_out.jsonl`).
UNMEASURED_BESIDE = ("hopper", "fused", "sequential")

_spent_s = 0.0  # measuring, in this process


def choose(problem: Problem, space: Workspace) -> tuple[Plan, str | None]:
    """A plan, and why it does not overlap although it was meant to (None otherwise).

    Collective over the workspace's group, and the same on all its ranks.
    """
    wanted = settings.get().strategy
    if wanted == "sequential" or problem.world_size == 1:
        return sequential.default_plan(problem), None
    names, reason = registry.overlapping(problem, wanted, space.unavailable)
    if not names:
        return sequential.default_plan(problem), reason
    if wanted != "auto":
        return of_strategy(problem, wanted, space), None
    return _agreed(problem, names, space), None


def of_strategy(problem: Problem, name: str, space: Workspace) -> Plan:
    """The strategy's first plan without a measurement: of `signalled` the leader's bands.

    Collective, as `choose`.
    """
    if name != "signalled":
        return registry.strategy(problem, name).default_plan(problem)
    plan = tuner.variants(problem, name, facts_for_bands(space))[0]
    return Plan.loads(space.agreement.ask(str(problem), plan.dumps())[0])


def facts_for_bands(space: Workspace) -> hardware.Hardware | None:
    """Facts of this machine, with an assumed link where theirs is not that of the group."""
    where = environment.of(space.device)
    return hardware.find_or_assume(where.gpu, where.link, one_node=space.unavailable is None)


def opened(folder: Path, device: torch.device) -> PlanCache:
    """The entries of the user's cache and those we ship, for this environment; read once."""
    return _opened(folder, device)


@lru_cache(maxsize=8)
def _opened(folder: Path, device: torch.device) -> PlanCache:
    where = partial(environment.of, device)
    cache = PlanCache([user_folder(folder), plan_cache.shipped()], where)
    for reason in cache.left_out:
        warnings.warn(
            f"flux_megatron: measured plans are left out, or read in part: {reason}",
            stacklevel=2,
        )
    return cache


def user_folder(folder: Path) -> Path:
    """Where in FLUX_MEGATRON_CACHE measured plans are."""
    return folder / "plans"


def keep(entry: Entry, folder: Path, device: torch.device) -> None:
    """Use the entry from now on, here and in later runs."""
    opened(folder, device).entries.insert(0, entry)
    try:
        plan_cache.store(user_folder(folder), entry)
    except OSError as error:
        warnings.warn(f"flux_megatron: a measured plan is not kept: {error}", stacklevel=2)


def _agreed(problem: Problem, names: list[str], space: Workspace) -> Plan:
    """The leader's plan; measured now, if the leader wants it and no rank is capturing a graph."""
    answer = _leader_answer(problem, names, space) if space.group.rank() == 0 else {}
    answer["capturing"] = capturing(space.device)
    said = [json.loads(text) for text in space.agreement.ask(str(problem), json.dumps(answer))]
    answer = said[0]
    if "measure" in answer and not any(theirs["capturing"] for theirs in said):
        plans = [Plan.loads(text) for text in answer["measure"]]
        if entry := _measured(problem, plans, space, answer["seconds"]):
            return entry.plan
    return Plan.loads(answer["plan"])


def _leader_answer(problem: Problem, names: list[str], space: Workspace) -> dict[str, Any]:
    """`plan` to use; or, where there is time, what to `measure` before and for how many seconds."""
    cache = opened(settings.get().cache, space.device)
    entry = cache.find(problem)
    possible = {*names, "sequential"}
    if entry is not None and entry.plan.strategy in possible:
        return {"plan": entry.plan.dumps()}
    for_bands = facts_for_bands(space)
    facts = hardware.find(cache.environment.gpu, cache.environment.link) and for_bands
    plans = tuner.candidates(problem, names, facts, for_bands)
    answer: dict[str, Any] = {"plan": _unmeasured(problem, plans, possible, cache, facts).dumps()}
    seconds = settings.get().tune_seconds - _spent_s
    if settings.get().tune == "lazy" and seconds > 0:
        answer |= {"measure": [candidate.dumps() for candidate in plans], "seconds": seconds}
    return answer


def _unmeasured(
    problem: Problem, plans: list[Plan], possible: set[str], cache: PlanCache,
    facts: hardware.Hardware | None,
) -> Plan:  # fmt: skip
    """The plan with the least estimate. Where no problem of the kind was measured beside others,
    one of `UNMEASURED_BESIDE` or, by the model, one GEMM behind a gather, by what was measured
    alone.
    """
    like = problem
    if problem.beside and not cache.like(problem):
        like = replace(problem, beside=False)
        possible = possible & {*UNMEASURED_BESIDE}
        plans = [
            plan for plan in plans
            if plan.strategy in possible or (facts and is_one_gemm(problem, plan))
        ]  # fmt: skip
    known = cache.like(like)
    plans = _safe(problem, plans, known)
    if facts is None:
        return _nearest(like, plans, possible, cache)
    return estimate.best(problem, plans, known, cache.environment.max_connections, facts)


def _safe(problem: Problem, plans: list[Plan], known: list[Entry]) -> list[Plan]:
    """Without the plans that an estimate alone shall not choose, as nobody has measured their like
    for this kind of problem:

    - tiles of 320, 192 or 160 columns, or 64 rows, which have run without communication only;
    - `hopper`'s GEMM+RS and GEMM+AR whose K is too short for a fetch of each rank's tile;
    - in a backward or over more than two ranks: one GEMM of `pipelined` behind a gather, and
      `hopper`'s AG+GEMM of rows that come in parts of K; there and beside others
      `low_latency` of divided rows;
    - `low_latency` of more than 64 rows;
    - over more than two ranks `hopper`'s AG+GEMM of shards that are no whole number of tiles, which
      two have run;
    - `signalled`, where kernels reach peers' memory: it was chosen, up to 8 % behind them in a
      backward, and 5 % in the step of an MLP (2 x H200, 2026-11-23, in docs/results/h200x2
      `all_reduced_connections-1.jsonl` and, against plain collectives, `compiled_layers.jsonl`).
    """
    measured = {name for e in known for one in e.measured for name in _kinds(e.problem, one.plan)}
    unsafe = {plan: _kinds(problem, plan) - measured for plan in plans}
    safe = [plan for plan in plans if not unsafe[plan]]
    if any(plan.strategy != "sequential" for plan in safe):
        return safe
    return [plan for plan in plans if unsafe[plan] <= {"signalled"}]


def _kinds(problem: Problem, plan: Plan) -> set[str]:
    """What an estimate needs a measurement of before it chooses the plan."""
    spec, kinds = problem.spec, set()
    untried = problem.world_size > 2 or problem.is_backward
    if plan.strategy == "signalled":
        kinds.add("signalled")
    if is_one_gemm(problem, plan) and untried:
        kinds.add("one GEMM behind a gather")
    if in_parts(problem, plan):
        return {"rows in parts of K"} if untried else set()
    divided = spec.gathers or spec.scatters
    if plan.strategy == "low_latency" and divided and (untried or problem.beside):
        kinds.add("few rows, divided")
    if plan.strategy == "low_latency" and problem.M > 64:
        kinds.add("more than 64 rows in words")
    if plan.strategy == "hopper":
        sides = plan.tile.block_m, plan.tile.block_n
        if sides not in ((128, 256), (128, 128)):
            kinds.add("tiles of {} x {}".format(*sides))
        ragged = spec.gathers and is_ragged(problem.M_shard, problem.world_size, plan.tile)
        if ragged and problem.world_size > 2:
            kinds.add("ragged shards of more than two")
        if not spec.gathers and _chunks(problem, plan.tile) < problem.world_size - 1:
            kinds.add("short sums")
    return kinds


def _chunks(problem: Problem, tile: Tile) -> int:
    return chunk_count(problem.world_size, cdiv(problem.K_local, tile.block_k))


def _nearest(like: Problem, plans: list[Plan], possible: set[str], cache: PlanCache) -> Plan:
    """Without a cost model: the fastest `possible` plan of the nearest entry, else the first plan
    that overlaps. Only a model tells whether few rows that are divided gain by `low_latency`.
    """
    near = [e for e in (cache.find(like), *cache.neighbours(like)) if e is not None]
    for entry in near:
        measured = (one.plan for one in entry.measured)  # the fastest first
        known = [plan for plan in (entry.plan, *measured) if plan.strategy in possible]
        if known:
            return known[0]
    divided = like.spec.gathers or like.spec.scatters
    others = [plan for plan in plans[1:] if not (divided and plan.strategy == estimate.FOR_FEW)]
    return others[0] if others else plans[0]


def _measured(
    problem: Problem, plans: list[Plan], space: Workspace, seconds: float
) -> Entry | None:
    global _spent_s
    started = time.monotonic()
    with lasting():  # what is measured belongs to no caller
        entry = tuner.measure(problem, plans, space.group, space.device, seconds=seconds)
    _spent_s += time.monotonic() - started
    if entry is None:
        return None
    if space.group.rank() == 0 and entry.untried == 0:
        keep(entry, settings.get().cache, space.device)
    if dist.get_rank() == 0:
        print(f"flux_megatron: {_described(entry, time.monotonic() - started)}", file=sys.stderr)
    return entry


def _described(entry: Entry, seconds: float) -> str:
    medians = {one.plan: one.median_us for one in entry.measured}
    plain = medians[Plan("sequential")]
    untried = f", {entry.untried} not tried for lack of time" if entry.untried else ""
    return (
        f"measured {entry.problem}: {entry.plan.strategy} {medians[entry.plan]:.0f} us, "
        f"sequential {plain:.0f} us ({len(medians)} plans in {seconds:.1f} s{untried})"
    )
