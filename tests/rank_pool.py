"""Ranks that serve many tests: on GPUs their start, ten seconds, would be most of a test.

There is one pool of processes a world size. A body finds it as a fresh process would be: what it
replaces in our modules and in those of tests is put back, its settings are taken back, and when all
ranks have answered they meet and let go of all memory. A pool whose body failed or did not answer
is thrown away, and so is one whose body leaves process groups behind.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rank_process import RankFailure, Ranks

START_S = 120  # imports, and the first communicator
TIDY_S = 30
OURS = tuple(f"{Path(__file__).parents[1] / folder}/" for folder in ("flux_megatron", "tests"))
SETTINGS = "FLUX_MEGATRON_"  # what variables of ours begin with


@dataclass(frozen=True)
class Task:
    """A body as it travels, and what it is run under."""

    pickled: bytes
    environment: dict[str, str]
    limit_s: float
    path: list[str]

    def __call__(self, rank: int) -> Any:
        sys.path[:] = self.path
        body, args = pickle.loads(self.pickled)
        faulthandler.dump_traceback_later(self.limit_s - 1)  # where a rank hangs
        try:
            with _settings(self.environment), _modules_put_back():
                return body(rank, *args)
        finally:
            faulthandler.cancel_dump_traceback_later()


@contextmanager
def _settings(environment: Mapping[str, str]) -> Iterator[None]:
    from flux_megatron import settings

    before = dict(os.environ)
    for name in [name for name in before if name.startswith(SETTINGS)]:
        del os.environ[name]
    os.environ.update(environment)
    settings.reload()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        settings.reload()


@contextmanager
def _modules_put_back() -> Iterator[None]:
    """Names of our modules, and of those of tests, mean what they meant before."""
    modules = [vars(one) for one in [*sys.modules.values()] if isinstance(one, ModuleType)]
    ours = [names for names in modules if (names.get("__file__") or "").startswith(OURS)]
    before = [dict(names) for names in ours]
    try:
        yield
    finally:
        for names, values in zip(ours, before, strict=True):
            names.update(values)


def forget() -> None:
    """Give back all memory, whoever holds it, and what ranks have agreed on."""
    from flux_megatron.symm import workspaces

    workspaces._give_back(workspaces.workspaces())
    workspaces._agreed_before.clear()


def tidy(rank: int) -> int:
    """When all ranks are done with a body: let go of what it has left; how many groups there are.

    Nobody frees memory that a peer's kernel or copy may still use.
    """
    from flux_megatron.overlap.report import reset_report
    from flux_megatron.symm import device
    from flux_megatron.tuning import plan_cache

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    forget()
    reset_report()
    plan_cache.opened.cache_clear()
    device.copy_engine.cache_clear()  # which engine it is, a setting says
    device.communication_stream.cache_clear()
    device.flag_stream.cache_clear()
    device.arrival_stream.cache_clear()
    gc.collect()
    torch.cuda.empty_cache()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)
    return len(dist.distributed_c10d._world.pg_map)


@dataclass
class Pool:
    """Ranks, and the names of the bodies that they have run."""

    ranks: Ranks
    served: list[str] = field(default_factory=list)

    def run(
        self, body: Callable, args: tuple, limit_s: float, environment: Mapping[str, str]
    ) -> list:
        """What each rank returned; a failure names what these processes had run before."""
        pickled = bytes(ForkingPickler.dumps((body, args)))
        ours = {name: value for name, value in os.environ.items() if name.startswith(SETTINGS)}
        ours |= {name: value for name, value in environment.items() if name.startswith(SETTINGS)}
        self.ranks.give(Task(pickled, ours, limit_s, [*sys.path]))
        before, self.served = self.served, [*self.served, body.__name__]
        try:
            return self.ranks.answers(limit_s if before else limit_s + START_S)
        except RankFailure as failure:
            said = f"{failure}\nThese processes ran before: {', '.join(before) or 'nothing'}."
            raise RankFailure(said) from None

    def is_tidy(self) -> bool:
        """Whether the ranks can be made what they were before the last body."""
        self.ranks.give(tidy)
        try:
            return all(groups == 1 for groups in self.ranks.answers(TIDY_S))
        except RankFailure:
            return False


_pools: dict[tuple[int, str], Pool] = {}


def run(
    body: Callable, world_size: int, args: tuple, *, limit_s: float,
    environment: Mapping[str, str], fresh: bool, device: str = "cuda",
) -> list:  # fmt: skip
    """What each rank returned. `fresh` processes serve this body alone, and so do those with an
    environment of more than settings.
    """
    fresh = fresh or not all(name.startswith(SETTINGS) for name in environment)
    pool = None if fresh else _pools.pop((world_size, device), None)
    if pool is None:
        context = mp.get_context("spawn" if device == "cuda" else "fork")
        pool = Pool(Ranks(world_size, device, context, environment if fresh else {}))
    usable = False
    try:
        answers = pool.run(body, args, limit_s, environment)
        usable = not fresh and pool.is_tidy()
        return answers
    finally:
        if usable:
            _pools[world_size, device] = pool
        else:
            pool.ranks.stop()


def stop_all() -> None:
    """At the end of the tests."""
    while _pools:
        _pools.popitem()[1].ranks.stop()
