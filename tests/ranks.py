"""Real processes for tests: `run_ranks(body, world_size, *args)` runs `body(rank, *args)` on each rank.

CPU ranks are forked (a parent that has imported torch and triton starts one in 50 ms) and speak gloo; with `device="cuda"` they
are spawned and speak NCCL. If one fails all are stopped, and the failure carries every rank's traceback.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class RankFailure(AssertionError):
    """At least one rank failed; the message holds the tracebacks."""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_ranks(
    body: Callable, world_size: int, *args, device: str = "cpu", limit_s: float = 120,
    environment: dict[str, str] | None = None,
) -> list:  # fmt: skip
    """What each rank returned, in rank order. `RankFailure` if any raised or the limit passed."""
    context = mp.get_context("fork" if device == "cpu" else "spawn")
    results = context.SimpleQueue()
    port = free_port()
    processes = [
        context.Process(
            target=_rank_main,
            args=(rank, world_size, port, device, environment or {}, results, body, args),
            daemon=True,
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    outcomes: dict[int, tuple[bool, object]] = {}
    deadline = time.monotonic() + limit_s
    try:
        while len(outcomes) < world_size and time.monotonic() < deadline:
            if results.empty():
                alive = [p.is_alive() for p in processes]
                if not any(alive) and results.empty():
                    break
                time.sleep(0.01)
                continue
            rank, ok, value = results.get()
            outcomes[rank] = (ok, value)
            if not ok:  # the others may wait for it: give them a moment to say what they saw
                deadline = min(deadline, time.monotonic() + 30)
    finally:
        for process in processes:
            process.join(1 if len(outcomes) == world_size else 0.1)
            if process.is_alive():
                process.kill()
                process.join()
    missing = [f"rank {r}: no answer (exit code {processes[r].exitcode})" for r in range(world_size)
               if r not in outcomes]  # fmt: skip
    failed = [f"rank {r}:\n{value}" for r, (ok, value) in sorted(outcomes.items()) if not ok]
    if missing or failed:
        raise RankFailure("\n".join(failed + missing))
    return [outcomes[rank][1] for rank in range(world_size)]


def _rank_main(rank, world_size, port, device, environment, results, body, args) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank), **environment,
    )  # fmt: skip
    torch.set_num_threads(1)
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
        from flux_megatron import settings

        settings.reload()
        dist.init_process_group("nccl" if device == "cuda" else "gloo", device_id=torch.device(
            "cuda", rank) if device == "cuda" else None)  # fmt: skip
        value = body(rank, *args)
        results.put((rank, True, value))
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
