"""The race of versions in small; `trees.py` is meant for GPUs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import trees
import triton

import flux_megatron

SCRIPT = Path(__file__).with_name("trees.py")
PACKAGE = Path(flux_megatron.__file__).parent


def race(out: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [
        sys.executable, str(SCRIPT), str(out), "--device", "cpu", "--rounds", "2", "--calls", "1",
        "--commit", "abc", *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)


def test_trees_race_after_every_case_is_exact(tmp_path):
    """Another Triton, which is the same here, and another checkout, which is the same too, with a
    variable.
    """
    own = Path(triton.__file__).parents[1]
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout" / "flux_megatron").symlink_to(PACKAGE)
    copy = f"copy={tmp_path}/checkout,FLUX_MEGATRON_NATIVE=0"
    named = {"installed": "installed", "again": f"again={own}", "copy": copy}
    given = [word for tree in named.values() for word in ("--tree", tree)]
    done = race(tmp_path / "rows.jsonl", *given, "--shapes", "32x16x16 nt,32x16x16 nn")
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {(*row["case"].rsplit(" ", 2), row["tree"]) for row in rows} == {
        (case, "32x16x16", layout, tree)
        for layout in ("nt", "nn")
        for case in (
            "library gemm",
            *(
                f"{pattern} {strategy}"
                for pattern in ("ag_gemm", "gemm_rs", "gemm_ar")
                for strategy in ("auto", "fused", "low_latency")
            ),
        )
        for tree in named
    }
    for row in rows:
        assert (row["triton"], row["commit"]) == (triton.__version__, "abc")
        assert row.get("FLUX_MEGATRON_NATIVE") == ("0" if row["tree"] == "copy" else None)
        assert len(row["times_us"]) == 2
        assert row["to_first"] == 1 or row["tree"] != "installed"


def test_a_wrong_tree_is_named_and_takes_no_part(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "flux_megatron")
    with (tmp_path / "flux_megatron" / "ops.py").open("a") as file:
        file.write("_right = all_gather_gemm\n")
        file.write("def all_gather_gemm(*args, **options): return _right(*args, **options) + 1\n")
    rows = tmp_path / "rows.jsonl"
    given = ("--tree", "installed", "--tree", f"broken={tmp_path}")
    only = ("--only", "ag_gemm fused,gemm_rs")
    done = race(rows, *given, "--shapes", "32x16x16 nt", *only)
    assert done.returncode == 1
    assert "ag_gemm fused 32x16x16 nt: WRONG in broken\n" in done.stdout
    raced = {json.loads(line)["case"].split()[0] for line in rows.read_text().splitlines()}
    assert raced == {"gemm_rs"}


def test_a_rank_that_ends_is_named(tmp_path):
    """The folder has neither package."""
    given = ("--tree", "installed", "--tree", f"none={tmp_path}")
    done = race(tmp_path / "rows.jsonl", *given, "--ranks", "1")
    assert done.returncode == 1
    assert "none: a rank ended with status 1" in done.stderr


def test_a_rank_that_has_ended_before_it_is_asked_is_named():
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    rank = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    rank.wait()
    with pytest.raises(SystemExit, match="none: a rank ended with status 3"):
        trees.Tree("none", [rank]).ask("check")


pytestmark = pytest.mark.timeout(200)
