"""Real processes for tests: `run_ranks(body, world_size, *args)` runs `body(rank, *args)` on each.

CPU ranks are forked (a parent that has imported torch and triton starts one in 20 ms) and speak
gloo; with `device="cuda"` they are spawned, so bodies must be functions of a module, and use NCCL.
`on_device` takes the GPUs if there are some. If one rank fails all are stopped, and the failure
carries every rank's traceback.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def be_late(seconds: float) -> None:
    """Hold back what this rank sends next: on GPUs the stream sleeps, not the host."""
    if DEVICE == "cuda":
        torch.cuda._sleep(int(seconds * 1.5e9))  # cycles
    else:
        time.sleep(seconds)


class RankFailure(AssertionError):
    """At least one rank failed; the message holds the tracebacks."""


def on_device(body: Callable, world_size: int, *args, **options) -> list:
    """`run_ranks` on GPUs where there are some, one a rank; skips a test that needs more."""
    if DEVICE == "cuda" and world_size > torch.cuda.device_count():
        pytest.skip(f"{world_size} ranks need as many GPUs, {torch.cuda.device_count()} here")
    return run_ranks(body, world_size, *args, device=DEVICE, **options)


def run_ranks(
    body: Callable, world_size: int, *args, device: str = "cpu", limit_s: float = 120,
    environment: dict[str, str] | None = None,
) -> list:  # fmt: skip
    """What each rank returned, in rank order. `RankFailure` if any raised or the limit passed."""
    context = mp.get_context("fork" if device == "cpu" else "spawn")
    if device == "cpu":
        for module in ("flux_megatron.nn.functions", "torch._dynamo"):  # custom operators load it
            importlib.import_module(module)  # once here, not once in each fork
    ports, results = context.SimpleQueue(), context.SimpleQueue()
    processes = [
        context.Process(
            target=_rank_main,
            args=(rank, world_size, ports, device, environment or {}, limit_s, results, body, args),
            daemon=True,
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    # The store lives here, because a rank that is done early must not take it away from the others;
    # and it starts after the forks, which would inherit whatever lock its thread holds just then.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _ in processes:
        ports.put(store.port)
    try:
        outcomes = _collect(processes, results, limit_s)
    finally:
        store.set("all have answered", "")
        for process in processes:
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join()
        # a failure's traceback keeps this frame, and later forks must not inherit the store
        del store
    missing = [f"rank {r}: no answer (exit code {processes[r].exitcode})" for r in range(world_size)
               if r not in outcomes]  # fmt: skip
    failed = [f"rank {r}:\n{value}" for r, (ok, value) in sorted(outcomes.items()) if not ok]
    if missing or failed:
        raise RankFailure("\n".join(failed + missing))
    return [outcomes[rank][1] for rank in range(world_size)]


def _collect(processes: list, results, limit_s: float) -> dict[int, tuple[bool, object]]:
    outcomes: dict[int, tuple[bool, object]] = {}
    deadline = time.monotonic() + limit_s
    while len(outcomes) < len(processes) and time.monotonic() < deadline:
        if results.empty():
            if not any(process.is_alive() for process in processes) and results.empty():
                break
            time.sleep(0.002)
            continue
        rank, ok, value = results.get()
        outcomes[rank] = (ok, value)
        if not ok:  # the others may wait for it: give them a moment to say what they saw
            deadline = min(deadline, time.monotonic() + 30)
    return outcomes


def _rank_main(
    rank, world_size, ports, device, environment, limit_s, results, body, args
) -> None:  # fmt: skip
    faulthandler.dump_traceback_later(limit_s - 1)  # where a rank hangs, before it is killed
    port = ports.get()
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank), **environment,
    )  # fmt: skip
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
        from flux_megatron import settings

        settings.reload()
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            device_id=torch.device("cuda", rank) if device == "cuda" else None,
        )
        results.put((rank, True, body(rank, *args)))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
    sys.stdout.flush()
    store.wait(["all have answered"], timedelta(hours=1))  # others may still use this rank's memory
    os._exit(0)  # at once: the threads of communicators have nothing to say any more
