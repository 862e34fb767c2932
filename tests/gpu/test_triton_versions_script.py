"""The race of versions of Triton in small; `triton_versions.py` is meant for GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

SCRIPT = Path(__file__).with_name("triton_versions.py")


def test_two_trees_race_after_every_case_is_exact(tmp_path):
    own = Path(triton.__file__).parents[1]
    command = [
        sys.executable, str(SCRIPT), str(tmp_path / "rows.jsonl"), "--tree", "installed",
        "--tree", f"again={own}", "--device", "cpu", "--shapes", "32x16x16", "--rounds", "2",
        "--calls", "1", "--commit", "abc",
    ]  # fmt: skip
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {(row["case"].rsplit(" ", 1)[0], row["tree"]) for row in rows} == {
        (case, tree)
        for case in ("library gemm", "ag_gemm fused", "gemm_rs fused")
        for tree in ("installed", "again")
    }
    for row in rows:
        assert (row["triton"], row["commit"]) == (triton.__version__, "abc")
        assert len(row["times_us"]) == 2
        assert row["to_first"] == 1 or row["tree"] == "again"


def test_a_rank_that_ends_is_named(tmp_path):
    command = [sys.executable, str(SCRIPT), str(tmp_path / "rows.jsonl"), "--device", "cpu",
               "--tree", "installed", "--tree", f"none={tmp_path}", "--ranks", "1"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 1
    assert "none: a rank ended with status 1" in done.stderr


pytestmark = pytest.mark.timeout(200)
