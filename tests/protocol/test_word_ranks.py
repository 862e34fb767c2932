"""Flags in the data under virtual ranks: every schedule, down to one resident CTA in any order."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from interpreted_access import needs_interpreter
from mutants import CASES as CASES_OF_MUTANTS
from protocol_cases import Case
from virtual_machine import Machine, Mutation, PackageCopy, mutated
from virtual_ranks import STANDARD, Schedule

from flux_megatron.problem import Pattern

pytestmark = needs_interpreter

FEW = {"strategy": "low_latency", "N": 40, "K": 8}
IN_PARTS = {**FEW, "K": 40}  # three k-tiles: of four parts one is empty
CASES = [
    Case("ar", rows=(2, 2, 2, 2), **FEW),
    Case("ar", rows=(1, 3, 1, 3), layout="nn", dtype=torch.bfloat16, **FEW),
    Case("ar", world_size=4, rows=(1, 1, 1), two_phase=True, dtype=torch.float16, **FEW),
    Case("ar", rows=(2,) * 5, two_streams=True, two_phase=True, **FEW),
]
CASES += [
    Case("rs", rows=(2, 1, 2, 1), **FEW),
    Case("rs", world_size=3, rows=(1, 2, 1), layout="nn", dtype=torch.bfloat16, **FEW),
    Case("rs", rows=(1,) * 6, captured=True, **FEW),
    Case("ag", rows=(2, 1, 2, 1), bias=True, **FEW),
    Case("ag", world_size=3, rows=(1, 3, 1), layout="nn", dtype=torch.bfloat16, **FEW),
    Case("ag", rows=(1,) * 6, captured=True, **FEW),
    Case("ag", rows=(2,) * 5, two_streams=True, **FEW),
    Case("backward", rows=(2, 1, 2), layout="nn", **FEW),
    Case("ar", rows=(2, 1, 2), tma=True, **FEW),
    Case("ag", rows=(2, 1, 2), layout="nn", tma=True, **FEW),
]
CASES += [
    Case("ar", rows=(2, 1, 2), parts=2, **IN_PARTS),
    Case("ar", rows=(1, 2), two_phase=True, parts=3, dtype=torch.bfloat16, **IN_PARTS),
    Case("rs", rows=(1,) * 6, captured=True, parts=2, layout="nn", **IN_PARTS),
    Case("ag", world_size=3, rows=(2, 1, 2), bias=True, parts=3, **IN_PARTS),
    Case("ag", rows=(2, 1, 2), tma=True, two_streams=True, parts=4, **IN_PARTS),
]
OF_MUTANTS = [c for c in CASES_OF_MUTANTS.values() if getattr(c, "strategy", "") == FEW["strategy"]]
# more CTAs than may be resident, which start in an order that differs between the ranks
ONE_BY_ONE = Schedule("one by one", "random", seed=4, resident=1, any_order=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_schedule(package, case):
    for schedule in STANDARD:
        case.run(package, schedule)


@pytest.mark.parametrize("case", [*CASES, *OF_MUTANTS], ids=str)
def test_ctas_may_run_one_by_one(package, case):
    case.run(package, ONE_BY_ONE)


@pytest.mark.parametrize("last", [2**30 - 2, 2**31 - 2, -2])
def test_epochs_wrap_around_and_old_words_are_renewed(package, last):
    """Words that look like those of a call to come are gone when it comes; results are exact."""
    machine, old = Machine(package, 2, ctas=2), package.signals.as_int32(last + 8)
    plan = package.problem.Plan("low_latency", tile=package.problem.Tile(16, 16, 16))
    build = package.low_latency.BUILDERS[Pattern.GEMM_AR]
    results: list[torch.Tensor] = []

    def host(rank: int) -> None:
        space = machine.workspaces[rank]
        x, w = torch.ones(2, 4), torch.ones(40, 4)
        start = partial(package.calls.start, build, x, w, "nt", plan, space)
        start()
        space._barrier("the test sets words")
        channel = space.channels["words"]
        channel.epochs.fill_(last)
        for region in channel._regions[:2]:
            region.view(rank, (region.size_bytes // 8,), torch.int64).fill_(old << 32)
        space._barrier("the test sets words")
        results.extend(start().finish() for _ in range(3))

    machine.run(STANDARD[3], host)
    assert all(torch.equal(y, torch.full((2, 40), 8.0)) for y in results)
    for space in machine.workspaces:
        channel = space.channels["words"]
        assert channel.epochs.item() == package.signals.as_int32(last + 3)
        for region in channel._regions[:2]:
            words = region.view(channel._rank, (region.size_bytes // 8,), torch.int64)
            assert not (words >> 32 == old).any()


PART, DRAW = "        part = tile - pieces", "        ticket = begin_draw(work, NUM_WARPS)\n"
ONLY_NOW = "        # only now: a CTA that waits must not keep the next tile from others\n"
DRAWN_EARLY = Mutation("kernels/few_rows/ag_gemv.py", ((PART, DRAW + PART), (ONLY_NOW + DRAW, "")))


def drawn_at_waits(package: PackageCopy) -> list[int]:
    """How many tiles are drawn when the only CTA of rank 0 comes to wait for the gathered rows."""
    machine, drawn = Machine(package, 2, ctas=1), []
    plan = package.problem.Plan("low_latency", tile=package.problem.Tile(16, 16, 16))
    wait = machine._host_wait

    def noted(*given) -> None:
        if machine.scheduler.rank == 0:
            drawn.append(int(machine.workspaces[0].channels["words"].work.max()))
        wait(*given)

    def host(rank: int) -> None:
        x, w, space = torch.ones(2, 8), torch.ones(40, 8), machine.workspaces[rank]
        build = package.low_latency.BUILDERS[Pattern.AG_GEMM]
        package.calls.whole(build, x, w, None, "nt", plan, space)

    machine._host_wait = noted
    machine.run(STANDARD[0], host)
    return drawn


def test_a_cta_that_waits_for_rows_keeps_no_tile_from_others(package, tmp_path):
    """One piece to send, two to receive, three GEMM tiles: each is drawn when the one before it is
    made, and not while a CTA waits.
    """
    assert drawn_at_waits(package) == [4, 5, 6]
    with mutated(DRAWN_EARLY, tmp_path) as keeps_one:
        assert drawn_at_waits(keeps_one) == [5, 6, 7]
