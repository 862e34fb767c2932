"""The package's protocol under every standard schedule, and the scheduler itself."""

from __future__ import annotations

import pytest
import torch
from interpreted_access import needs_interpreter
from protocol_cases import Case, run
from virtual_machine import Machine, PackageCopy
from virtual_ranks import STANDARD, Deadlock, Schedule

pytestmark = needs_interpreter

_BLOCKS = {
    "rows": (13, 20, 20), "N": 144, "K": 272, "comm_rows": 5, "scaled": True, "split": True,
    "blockwise": True,
}  # fmt: skip

# W = 2: everything that the protocol may depend on
CASES = [
    Case("ag", bias=True),
    Case("ag", layout="nn", comm_rows=0),
    Case("ag", rows=(7, 20, 33), comm_rows=5, dtype=torch.bfloat16),
    Case("ag", rows=(5, 5, 5, 5, 5), N=8, comm_rows=1),
    Case("ag", rows=(33, 7, 20, 20), comm_rows=24, dtype=torch.float16, bias=True),
    Case("ag", comm_rows=10, tma=True, layout="nn"),
    Case("rs", layout="nn", comm_rows=0),
    Case("rs", rows=(7, 20, 33), comm_rows=5, dtype=torch.bfloat16),
    Case("rs", rows=(5, 5, 5, 5, 5), N=8, comm_rows=1),
    Case("rs", rows=(33, 7, 20, 20), comm_rows=24, dtype=torch.float16, K=20),
    Case("rs", comm_rows=10, tma=True),
    Case("rs", ctas=1_000, comm_rows=12),
    Case("backward", rows=(20, 20, 40), layout="nn"),
    Case("ag", "pipelined", rows=(7, 20, 20), comm_rows=5, bias=True),
    Case("rs", "pipelined", rows=(7, 20, 20), comm_rows=5),
    Case("backward", "pipelined", layout="nn"),
    Case("ag", "pipelined", comm_rows=5, bias=True, scaled=True),
    Case("ag", "pipelined", 3, bias=True, **_BLOCKS),
    Case("ag", "pipelined", 3, parts=1, **_BLOCKS),
    Case("ag", "pipelined", 3, parts=2, **_BLOCKS),
    Case("rs", "pipelined", 3, **_BLOCKS),
    Case("rs", "pipelined", parts=1, **_BLOCKS),
    Case("ar", rows=(7, 20, 20), comm_rows=5),
    Case("ar", "pipelined", rows=(7, 20, 20), comm_rows=5, layout="nn"),
]


# Six calls: eager, captured and replayed, replayed again, eager, replayed twice
SIX = (9,) * 6
CAPTURED = [
    Case(host, strategy, world_size, rows=SIX, N=16, comm_rows=5, captured=True)
    for host in ("ag", "rs", "backward")
    for strategy in ("fused", "pipelined")
    for world_size in (2, 3)
] + [Case("ar", "pipelined", 3, rows=SIX, N=16, comm_rows=5, captured=True)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks(package, case):
    for schedule in STANDARD:
        run(case, package, schedule)


@pytest.mark.parametrize("case", CAPTURED, ids=str)
def test_replays_between_eager_calls(package, case):
    for schedule in STANDARD:
        run(case, package, schedule)


@pytest.mark.parametrize("strategy", ["fused", "pipelined"])
@pytest.mark.parametrize("host", ["ag", "rs", "backward"])
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_world_sizes(package, host, strategy, world_size):
    case = Case(host, strategy, world_size, rows=(20, 11, 11), N=16, comm_rows=8)
    for schedule in STANDARD:
        run(case, package, schedule)


@pytest.mark.parametrize("host", ["ag", "rs"])
@pytest.mark.parametrize("schedule", [STANDARD[0], STANDARD[-1]], ids=lambda s: s.name)
def test_eight_ranks(package, host, schedule):
    run(Case(host, world_size=8, rows=(9, 9, 9), N=16, comm_rows=5), package, schedule)


@pytest.mark.parametrize("schedule", STANDARD, ids=lambda s: s.name)
def test_same_seed_same_run(package, schedule):
    case = Case("backward", rows=(8, 8), N=16)
    first, second = (run(case, package, schedule).trace for _ in range(2))
    assert first == second


def test_other_seed_other_run(package):
    case = Case("ag", rows=(8, 8), N=16)
    traces = [run(case, package, Schedule("", "random", seed=seed)).trace for seed in (1, 2)]
    assert traces[0] != traces[1]


def test_epochs_wrap_around(package):
    """Calls across the largest epoch, 2**31 - 1 as a signed word, and across 2**32."""
    for last in (2**31 - 2, 2**32 - 2):
        machine = _machine_after_epoch(package, last)
        x = [torch.arange(6.0).view(2, 3) + rank for rank in range(2)]
        seen: dict[tuple[int, int], torch.Tensor] = {}

        def host(rank: int, machine=machine, x=x, seen=seen) -> None:
            for call in range(4):
                mine = torch.empty_like(x[rank]).copy_(x[rank])
                mine += call
                plan = package.problem.Plan("fused", comm_rows=1)
                gather = package.fused.start_gather(mine, plan, machine.workspaces[rank])
                gathered = gather.complete()
                seen[rank, call] = torch.empty_like(gathered).copy_(gathered)
                gather.close()

        machine.run(STANDARD[4], host)
        for (_, call), gathered in seen.items():
            torch.testing.assert_close(gathered, torch.cat(x) + call, rtol=0, atol=0)


def _machine_after_epoch(package: PackageCopy, epoch: int) -> Machine:
    machine = Machine(package, world_size=2, ctas=1)
    for workspace in machine.workspaces:
        workspace.channels["gather"].epoch = epoch
        for pad in workspace.channels["gather"]._pads:
            pad.fill_(package.signals.as_int32(epoch))
    return machine


def test_deadlock_names_who_waits_for_what(package):
    machine = Machine(package, world_size=2, ctas=1)

    def host(rank: int) -> None:
        if rank == 0:  # rank 1 never comes, but for the growth of the workspace
            x = torch.zeros(4, 4)
            plan = package.problem.Plan("fused")
            package.fused.start_gather(x, plan, machine.workspaces[0]).complete()
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
        plan = package.problem.Plan("fused")
        package.fused.start_gather(torch.zeros(4, 4), plan, machine.workspaces[0]).complete()

    with pytest.raises(RuntimeError, match="rank 1 is broken"):
        machine.run(STANDARD[0], host)


def test_one_call_a_channel(package):
    machine = Machine(package, world_size=1, ctas=1)

    def host(rank: int) -> None:
        for _ in range(2):
            machine.workspaces[0].begin("gather", 64)

    with pytest.raises(package.errors.WorkspaceError, match="another was open"):
        machine.run(STANDARD[0], host)
