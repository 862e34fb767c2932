"""The package's protocol under every standard schedule, and the scheduler itself."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from interpreted_access import needs_interpreter
from mutants import BLOCKS, SIX, not_of_mutants
from protocol_cases import Case
from token_cases import TokenCase
from virtual_machine import Machine, PackageCopy
from virtual_ranks import STANDARD, Deadlock, Schedule

pytestmark = needs_interpreter

# beside those of mutants, at first W = 2: everything that the protocol may depend on
CASES = [
    Case("ag", layout="nn", comm_rows=0),
    Case("ag", rows=(7, 20, 33), comm_rows=5, dtype=torch.bfloat16),
    Case("ag", rows=(5, 5, 5, 5, 5), N=8, comm_rows=1),
    Case("ag", rows=(33, 7, 20, 20), comm_rows=24, dtype=torch.float16, bias=True),
    Case("ag", comm_rows=10, tma=True, layout="nn"),
    Case("rs", rows=(7, 20, 33), comm_rows=5, dtype=torch.bfloat16),
    Case("rs", rows=(5, 5, 5, 5, 5), N=8, comm_rows=1),
    Case("rs", rows=(33, 7, 20, 20), comm_rows=24, dtype=torch.float16, K=20),
    Case("rs", comm_rows=10, tma=True),
    Case("backward", "pipelined", layout="nn"),
    Case("ag", "pipelined", comm_rows=5, bias=True, scaled=True),
    Case("ag", "pipelined", 3, parts=1, **BLOCKS),
    Case("ag", "pipelined", 3, parts=2, **BLOCKS),
    Case("rs", "pipelined", parts=1, **BLOCKS),
    Case("ar", "pipelined", rows=(7, 20, 20), comm_rows=5, layout="nn"),
]
for _host, _strategy in product(("ag", "rs", "backward"), ("fused", "pipelined")):
    CASES += [Case(_host, _strategy, ranks, **SIX) for ranks in (2, 3)]
    CASES += [
        Case(_host, _strategy, ranks, rows=(20, 11, 11), N=16, comm_rows=8) for ranks in (1, 3, 4)
    ]
CASES += [Case("ar", "pipelined", 3, **SIX)]
# across the largest epoch, 2**31 - 1 as a signed word, and across 2**32
CASES += [
    Case("backward", strategy, rows=(9,) * 4, last_epoch=last)
    for strategy in ("fused", "pipelined") for last in (2**31 - 2, 2**32 - 2)
]  # fmt: skip

CASES += [
    TokenCase(world_size=4, experts=1, calls=2, tokens=6),
    TokenCase(world_size=3, experts=2, topk=6, calls=2, tokens=6),  # all experts of all ranks
    TokenCase(tokens=1, calls=3),
    TokenCase(reverse=True, calls=2, world_size=3, tokens=6),
    TokenCase(captured=True, calls=3, tokens=6, topk=3),
]


@pytest.mark.parametrize("case", not_of_mutants(CASES), ids=str)
def test_every_schedule(package, case):
    for schedule in STANDARD:
        case.run(package, schedule)


@pytest.mark.parametrize("host", ["ag", "rs"])
@pytest.mark.parametrize("schedule", [STANDARD[0], STANDARD[-1]], ids=lambda s: s.name)
def test_eight_ranks(package, host, schedule):
    Case(host, world_size=8, rows=(9, 9, 9), N=16, comm_rows=5).run(package, schedule)


@pytest.mark.parametrize("schedule", STANDARD, ids=lambda s: s.name)
def test_same_seed_same_run(package, schedule):
    case = Case("backward", rows=(8, 8), N=16)
    first, second = (case.run(package, schedule).trace for _ in range(2))
    assert first == second


def test_other_seed_other_run(package):
    case = Case("ag", rows=(8, 8), N=16)
    traces = [case.run(package, Schedule("", "random", seed=seed)).trace for seed in (1, 2)]
    assert traces[0] != traces[1]


def gathered(package: PackageCopy, machine: Machine, rank: int) -> None:
    gather_rows, x = package.gather.gather_rows, torch.zeros(4, 4)
    plan, space = package.problem.Plan("fused"), machine.workspaces[rank]
    package.calls.start_gather(gather_rows, x, plan, space).complete()


def test_deadlock_names_who_waits_for_what(package):
    machine = Machine(package, world_size=2, ctas=1)

    def host(rank: int) -> None:
        if rank == 0:  # rank 1 never comes, but for the growth of the workspace
            gathered(package, machine, rank)
        else:
            machine.workspaces[1].begin("gather", 2 * 64)

    waiting = r"rank 0 wait_sources_kernel\[0\] waits for communication tile 0 of rank 1, epoch 1"
    with pytest.raises(Deadlock, match=waiting + r" \(slot holds 0\)"):
        machine.run(STANDARD[0], host)


def test_failure_of_a_rank_is_raised(package):
    machine = Machine(package, world_size=2, ctas=1)

    def host(rank: int) -> None:
        if rank == 1:
            raise RuntimeError("rank 1 is broken")
        gathered(package, machine, rank)

    with pytest.raises(RuntimeError, match="rank 1 is broken"):
        machine.run(STANDARD[0], host)


def test_one_call_a_channel(package):
    machine = Machine(package, world_size=1, ctas=1)

    def host(rank: int) -> None:
        for _ in range(2):
            machine.workspaces[0].begin("gather", 64)

    with pytest.raises(package.errors.WorkspaceError, match="another was open"):
        machine.run(STANDARD[0], host)
