"""The processes of one world: how they start and meet, do what they are given, and are stopped."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

AFTER_A_FAILURE_S = 15  # in which the other ranks, who may wait for it, can say what they saw
LOOK_S = 0.05  # after which it is seen that all have ended without an answer
_DONE = "all have answered"

Work = Callable[[int], Any]  # is given the rank


class RankFailure(AssertionError):
    """At least one rank failed; the message holds the tracebacks."""


class Ranks:
    """`world_size` processes with a process group. They do `work`; or, where it is None, whatever
    they are given, one piece after the other.
    """

    def __init__(
        self, world_size: int, device: str, context: Any, environment: Mapping[str, str],
        work: Work | None = None,
    ) -> None:  # fmt: skip
        # spawned processes look for a queue's semaphores by name, so the queues have to stay
        self._ports, self._results = context.SimpleQueue(), context.SimpleQueue()
        self._work = [context.SimpleQueue() for _ in range(world_size)]
        told = world_size, device, dict(environment), work, self._ports, self._results
        self._processes = [
            context.Process(target=_rank_main, args=(rank, given, *told), daemon=True)
            for rank, given in enumerate(self._work)
        ]
        for process in self._processes:
            process.start()
        # The store lives here, because a rank that is done early must not take it away from the
        # others; it starts after the forks, which would inherit whatever lock its thread holds.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for _ in self._processes:
            self._ports.put(self._store.port)

    def give(self, work: Work) -> None:
        """To every rank: a picklable object."""
        for queue in self._work:
            queue.put(work)

    def answers(self, limit_s: float) -> list:
        """What each rank returned; `RankFailure` if any raised, or did not answer in time."""
        outcomes = self._collect(limit_s)
        failed = [f"rank {r}:\n{value}" for r, (ok, value) in sorted(outcomes.items()) if not ok]
        missing = [
            f"rank {rank}: no answer (exit code {process.exitcode})"
            for rank, process in enumerate(self._processes) if rank not in outcomes
        ]  # fmt: skip
        if missing or failed:
            raise RankFailure("\n".join(failed + missing))
        return [outcomes[rank][1] for rank in range(len(self._processes))]

    def _collect(self, limit_s: float) -> dict[int, tuple[bool, object]]:
        outcomes: dict[int, tuple[bool, object]] = {}
        deadline = time.monotonic() + limit_s
        while len(outcomes) < len(self._processes) and time.monotonic() < deadline:
            gone = not any(process.is_alive() for process in self._processes)
            if not self._results._reader.poll(LOOK_S):  # asleep: the ranks need the cores
                if gone:
                    break
                continue
            rank, ok, value = self._results.get()
            outcomes[rank] = (ok, value)
            if not ok:
                deadline = min(deadline, time.monotonic() + AFTER_A_FAILURE_S)
        return outcomes

    def let_go(self) -> None:
        """After their only work: they end by themselves, within a second."""
        self._store.set(_DONE, "")
        deadline = time.monotonic() + 1
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.stop()

    def stop(self) -> None:
        """Whatever they do."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
        # a failure's traceback keeps this object, and later forks must not inherit the store
        self.__dict__.pop("_store", None)


def _rank_main(
    rank: int, given: Any, world_size: int, device: str, environment: dict[str, str],
    work: Work | None, ports: Any, results: Any,
) -> None:  # fmt: skip
    port = ports.get()
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        **{name: value.replace("{rank}", str(rank)) for name, value in environment.items()},
    )  # fmt: skip
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    try:
        one_gpu = "CUDA_VISIBLE_DEVICES" in environment  # each has another, of the same number
        _join_world(rank, world_size, device, store, one_gpu)
    except Exception:
        results.put((rank, False, traceback.format_exc()))
    else:
        if work is not None:
            _answer(results, rank, work)
        while work is None:
            _answer(results, rank, given.get())
    sys.stdout.flush()
    store.wait([_DONE], timedelta(hours=1))  # others may still use this rank's memory
    os._exit(0)  # at once: the threads of communicators have nothing to say any more


def _answer(results: Any, rank: int, work: Work) -> None:
    try:
        results.put((rank, True, work(rank)))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))


def _join_world(
    rank: int, world_size: int, device: str, store: dist.TCPStore, one_gpu: bool
) -> None:
    torch.set_num_threads(1)
    own = None  # GPU
    if device == "cuda":
        own = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(own)
        if world_size > torch.cuda.device_count() and not one_gpu:
            # NCCL takes ranks of one GPU from several machines alone, and joins them by sockets
            os.environ["NCCL_HOSTID"] = f"machine of rank {rank}"
    from flux_megatron import settings

    settings.reload()
    dist.init_process_group(
        "gloo" if own is None else "nccl", store=store, rank=rank, world_size=world_size,
        device_id=own,
    )  # fmt: skip
