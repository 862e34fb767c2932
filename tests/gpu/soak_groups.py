"""Groups that come and go at random, of two sizes, with calls at new lengths and with failures:
what happens to one must not be seen in another, and every result must be exact.

    torchrun --nproc-per-node 4 tests/gpu/soak_groups.py --rounds 300
    TRITON_INTERPRET=1 torchrun --nproc-per-node 4 tests/gpu/soak_groups.py --rounds 20

Pairs draw their own numbers of calls and lengths, so that their memory grows a different number of
times before ranks of both meet in a group of all. In a failure one rank does not come, breaks in
the middle of a call, brings another length or none, or has another strategy set; then the group is
destroyed, or its memory released. A kernel for which no GPU has room, and a race for which one rank
has no memory, harm no group. Prints one JSON row; the first wrong result or unexpected error
ends the run.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

os.environ.setdefault("FLUX_MEGATRON_TIMEOUT_S", "4")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
sys.path.append(str(Path(__file__).parents[1]))  # for `cases`

import torch
import torch.distributed as dist
from cases import Case, check, fail_in_a_call
from ranks import DEVICE, here
from soak import printed
from torch.distributed import ProcessGroup
from triton.runtime.errors import OutOfResources

import flux_megatron
from flux_megatron import errors, ops, settings
from flux_megatron.kernels.triton_launch import Launcher
from flux_megatron.overlap import calls
from flux_megatron.patterns import Pattern
from flux_megatron.problem import Plan, Tile
from flux_megatron.symm.workspaces import workspace
from flux_megatron.tune_command.measure import joined
from flux_megatron.tuning import ahead
from flux_megatron.tuning.trial import Trial

LONGEST = 2048 if DEVICE == "cuda" else 40  # rows of a shard
N, K = (256, 64) if DEVICE == "cuda" else (8, 4)
PIPELINED = Plan("pipelined")  # by which a rank that comes waits for one that does not
FEW = Plan("low_latency", tile=Tile(16, 16, 16))  # by which a call begins with its kernel
HARMLESS = ("no room for a kernel", "no memory for a race")
WAYS = ("does not come", "breaks", "another length", "no rows", "another strategy")
LIVE = 3  # groups at a time, of this rank


@contextlib.contextmanager
def settings_with(**given: str) -> Iterator[None]:
    with mock.patch.dict(os.environ, given):
        settings.reload()
        yield
    settings.reload()


def refused(x: torch.Tensor, w: torch.Tensor, group: ProcessGroup, plan: Plan | None) -> bool:
    """Whether a call ends with an error of ours."""
    try:
        ops.all_gather_gemm(x, w, group, plan=plan)
        flux_megatron.synchronize()
    except errors.FluxError:
        return True
    return False


class Lives:
    """The groups of this rank that live, and what has been done to them. All ranks draw alike."""

    def __init__(self, seed: int) -> None:
        self._seed, self._draw = seed, random.Random(seed)
        self.groups: list[ProcessGroup] = []
        self.done: Counter[str] = Counter()
        self.rounds = 0

    def round(self) -> None:
        """Something happens to a group of each rank; then all groups compute."""
        self.rounds += 1
        if len(self.groups) < LIVE:
            self._make()
        at, step = self._draw.randrange(len(self.groups)), self._draw.random()
        way, cure = self._draw.choice(WAYS), self._draw.choice(["destroy", "release"])
        if step < 0.3:
            self._destroy(at)
        elif step < 0.6:
            self._fail(at, way)
            self.done[f"{way}, {cure}"] += 1
            if cure == "destroy":
                self._destroy(at)
            else:
                flux_megatron.release(self.groups[at])
        elif step < 0.75:
            self._lack(self.groups[at], self._draw.choice(HARMLESS))
        for group in self.groups:
            self._calls(group)
        flux_megatron.confirm_step()

    def _make(self) -> None:
        size = self._draw.choice([2, dist.get_world_size()])
        self.done[f"groups of {size}"] += 1
        for first in range(0, dist.get_world_size(), size):
            made = dist.new_group([*range(first, first + size)])
            if first <= dist.get_rank() < first + size:
                self.groups.append(made)

    def _destroy(self, at: int) -> None:
        dist.barrier()
        dist.destroy_process_group(self.groups.pop(at))

    def _calls(self, group: ProcessGroup) -> None:
        """Those of another group of the same size differ."""
        draw = random.Random(f"{self._seed} {self.rounds} {dist.get_process_group_ranks(group)}")
        for _ in range(draw.randint(1, 3)):
            rows, seed = int(LONGEST ** draw.random()), draw.randrange(1000)
            pattern, plan = draw.choice([*Pattern]), draw.choice([None, PIPELINED])
            case = Case(pattern, rows, N, K, torch.bfloat16, plan=plan, seed=seed, kept=0.15)
            check(case, group)
            self.done["calls"] += 1

    def _fail(self, at: int, way: str) -> None:
        """One rank of the group does, and all others get an error of ours."""
        group = self.groups[at]
        check(Case("ag_gemm", 2, N, K, torch.bfloat16, plan=PIPELINED, kept=0.15), group)
        columns, plan = N, PIPELINED
        if way == "another strategy":  # of a layer that is new to all
            columns, plan = N + 8 * self.rounds, None
        x, w = (torch.ones(rows, K, device=here(), dtype=torch.bfloat16) for rows in (3, columns))
        culprit = group.rank() == self._draw.randrange(2)
        lost = way in ("does not come", "breaks")
        dist.barrier()
        if culprit and way == "breaks":
            with contextlib.suppress(ZeroDivisionError):
                fail_in_a_call(workspace(group, here()), ZeroDivisionError())
        elif not (culprit and lost):
            if culprit and way in ("no rows", "another length"):
                x = x[:0] if way == "no rows" else torch.cat([x, x])
            with settings_with(
                FLUX_MEGATRON_STRATEGY="sequential" if culprit and plan is None else "auto"
            ):
                # no rows return before the others come
                said = [refused(mine, w, group, plan) for mine in (x, torch.cat([x, x, x]))]
            assert any(said), f"{way}: this rank has seen nothing"
        dist.barrier()

    def _lack(self, group: ProcessGroup, what: str) -> None:
        """All ranks of the group find no room for a kernel, or one none for a race."""
        self.done[what] += 1
        small = Case("gemm_rs", 2, N, K, torch.bfloat16, plan=FEW, kept=0.15)
        if what == "no room for a kernel":
            by_python = mock.patch.object(calls, "is_watched", return_value=True)
            refused = mock.patch.object(Launcher, "_launch", side_effect=OutOfResources(2, 1, what))
            with by_python, refused, contextlib.suppress(OutOfResources):
                check(small, group)
                raise AssertionError("a launch that fails has given a result")
        else:
            short = {"side_effect": MemoryError(what)} if group.rank() == 1 else {}
            with (
                settings_with(FLUX_MEGATRON_TUNE="on"),
                mock.patch.object(ahead, "compile_kinds"),
                mock.patch.object(Trial, "reserve", **short),
            ):
                check(Case("ag_gemm", 2, N + 8 * self.rounds, K, torch.bfloat16, kept=0.15), group)
        check(small, group)


def soak_groups(rounds: int, seed: int = 0, seconds: float = 3600.0) -> dict:
    """A row of so many rounds, of fewer if time is up."""
    lives, started = Lives(seed), time.monotonic()
    while lives.rounds < rounds:
        lives.round()
        up = torch.tensor([time.monotonic() - started > seconds], dtype=torch.int32, device=here())
        dist.all_reduce(up, op=dist.ReduceOp.MAX)
        if up.item():
            break
    while lives.groups:
        lives._destroy(0)
    return {
        "what": "soak_groups", "ranks": dist.get_world_size(), "rounds": lives.rounds, "seed": seed,
        "seconds": round(time.monotonic() - started, 1), "done": dict(lives.done),
        "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def main(rounds: int = 300, seed: int = 0, seconds: float = 3600.0) -> None:
    """Run on the ranks of torchrun."""
    with joined(DEVICE):
        printed(soak_groups(rounds, seed, seconds))


if __name__ == "__main__":
    import typer

    typer.run(main)
