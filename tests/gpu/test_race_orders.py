"""Racing orders in small, and that a hang is counted. `race_orders.py` is meant for GPUs."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from unittest import mock

import gpu_run
import pytest
import race_orders
import torch
import torch.distributed as dist
from ranks import RankFailure, run_ranks

from flux_megatron.bench import provenance

FEW = {"count": 4, "seed": 1, "graphs": 0.0, "every": 4, "megabytes": 1, "small": True}


def _run(out: Path) -> gpu_run.Run:
    device, group = torch.device("cpu"), dist.group.WORLD
    about = provenance.describe(device, group.size(), torch.bfloat16, 1, False, "none")
    return gpu_run.Run(group, device, about, out)


def orders(rank: int, out: Path) -> tuple[dict, list[tuple[int, int]]]:
    """The row, and after how many calls this rank launched which all-reduce."""
    launched = []
    launch = race_orders.Race._launch_next

    def recorded(self) -> None:
        launched.append((self.launched, self.made))
        launch(self)

    with mock.patch.object(race_orders.Race, "_launch_next", recorded):
        return race_orders.race(_run(out), calls=30, stall_s=60, **FEW), launched


def a_rank_that_waits(rank: int, out: Path) -> None:
    """Rank 1 never makes its tenth call."""
    step = race_orders.Race.step

    def stuck(self) -> None:
        if rank == 1 and self.made == 9:
            threading.Event().wait()
        step(self)

    with mock.patch.object(race_orders.Race, "step", stuck):
        race_orders.race(_run(out), calls=30, stall_s=4, **FEW)


def test_every_rank_launches_every_all_reduce_in_an_order_of_its_own(tmp_path):
    (row, first), (_, second) = run_ranks(orders, 2, tmp_path / "rows.jsonl")
    assert (row["hangs"], row["wrong"], row["calls"]) == (0, 0, 30)
    assert {"fused", "pipelined", "sequential"} <= {*row["strategies"]}
    assert [n for n, _ in first] == [n for n, _ in second] == [*range(row["all_reduces"])]
    assert row["all_reduces"] == 7
    assert first[0] == (0, 4)
    assert second[0] == (0, 5)


def test_a_hang_ends_the_process_with_a_row(tmp_path):
    with pytest.raises(RankFailure, match="exit code 3"):
        run_ranks(a_rank_that_waits, 2, tmp_path / "rows.jsonl", limit_s=60)
    (row,) = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert row["hangs"] == 1
    assert row["error"].startswith("Stall: rank 0: no call has ended for 4 s")


def test_progress_keeps_the_watchdog_quiet():
    said = []
    watchdog = race_orders.Watchdog(0.2, said.append)
    for ended in range(4):
        time.sleep(0.1)
        watchdog.progress(ended)
    assert said == []
    time.sleep(0.5)
    assert said == [3]
