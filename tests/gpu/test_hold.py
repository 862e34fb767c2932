"""The hold test rehearsed without a GPU: nothing is held there; and what a hold that was outlasted
looks like.
"""

from __future__ import annotations

import json
from pathlib import Path

import gpu_run
import hold
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from flux_megatron.bench import provenance

CHECKOUT = Path(hold.__file__).parents[2]
SHAPE = (32, 16, 16)
PIECES = ("ag_gemm", "column backward")


def _run(out: Path) -> gpu_run.Run:
    device, group = torch.device("cpu"), dist.group.WORLD
    about = provenance.describe(device, group.size(), torch.bfloat16, 1, False, "none")
    return gpu_run.Run(group, device, about, out)


def both_versions(rank: int, out: Path) -> None:
    holds = [hold.Held(), hold.Held(1, "all")]
    with hold.other_version(CHECKOUT) as package:
        versions = {"new": "flux_megatron", "old": package}
        hold.measure(_run(out), versions, [SHAPE], PIECES, holds, 60, 2, 1)


def an_outlasted_hold(rank: int, out: Path) -> None:
    """On rank 1 alone; the row must report it."""

    def once(*_):
        return 100.0 + rank, float(rank == 1)

    hold._once = once
    entrant = hold.Entrant("new", "sequential", "{}", lambda: None)
    held = hold.Held(8, "rank0")
    (_,) = hold.rows_of(_run(out), "gemm_rs", SHAPE, held, [entrant], 60, 3)


def _rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_every_strategy_of_both_versions(tmp_path, capfd):
    run_ranks(both_versions, 2, tmp_path / "rows.jsonl")
    rows = _rows(tmp_path / "rows.jsonl")
    for piece in PIECES:
        free = [row for row in rows if row["piece"] == piece and row["held_on"] == "none"]
        both = {"low_latency", "fused", "pipelined", "signalled"}
        assert {(row["version"], row["strategy"]) for row in free} == {
            ("new", "sequential"), *((version, name) for version in ("new", "old") for name in both)
        }  # fmt: skip
        assert all(len(row["times_us"]) == 2 and row["us"] > 0 for row in free)
        assert all((row["to_old"] is not None) == (row["version"] == "new" and
                   row["strategy"] != "sequential") for row in free)  # fmt: skip
    assert {(row["table"], row["tp"], row["commit"]) for row in rows} == {("hold", 2, "none")}
    assert "column backward 32x16x16" in capfd.readouterr().out


def test_a_call_that_outlasts_the_hold_on_any_rank_is_reported(tmp_path):
    run_ranks(an_outlasted_hold, 2, tmp_path / "rows.jsonl")
    (row,) = _rows(tmp_path / "rows.jsonl")
    assert row["finished_while_held"] is False
    assert row["us"] == 101
    assert hold._cell(row).endswith("!")


def test_a_folder_without_the_package_is_refused(tmp_path):
    expected = pytest.raises(ValueError, match="a checkout of flux_megatron expected")
    with expected, hold.other_version(tmp_path):
        pass
