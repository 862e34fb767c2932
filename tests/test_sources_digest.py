"""The digest of the sources follows what calls run."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path

import pytest

from flux_megatron.tuning.environment import PACKAGE, ROOMS, sources_digest


@pytest.mark.parametrize(
    ("file", "stale"),
    [("kernels/gemm.py", True), ("kernels/new.py", True), ("overlap/fused.py", True),
     ("expert_parallel/fused.py", True), ("symm/enqueue.c", True), ("symm/notes.txt", False),
     ("nn/linear.py", False)],
)  # fmt: skip
def test_an_edit_of_what_runs_makes_plans_stale(tmp_path, file, stale):
    for room in (*ROOMS, "nn"):
        (tmp_path / room).mkdir()
        for name in ("gemm.py", "fused.py", "enqueue.c", "notes.txt", "linear.py"):
            (tmp_path / room / name).write_text("a = 1\n")
    before = sources_digest.__wrapped__(tmp_path)
    assert sources_digest.__wrapped__(tmp_path) == before
    (tmp_path / file).write_text("a = 2\n")
    assert (sources_digest.__wrapped__(tmp_path) != before) == stale


def test_the_rooms_are_there():
    for room in ROOMS:
        assert [*(PACKAGE / room).glob("*.py")], room


def test_plans_of_a_commit_get_the_digest_of_today(tmp_path, monkeypatch):
    """Here HEAD stands for the commit; its digest is another one where the tree differs."""
    script = Path(__file__).parents[1] / "scripts/rekey_plans.py"
    main = runpy.run_path(str(script), run_name="not main")["main"]
    digest = main.__globals__["sources_digest"]
    monkeypatch.setitem(
        main.__globals__, "sources_digest", lambda *of: digest(*of) if of else "today"
    )
    monkeypatch.chdir(script.parents[1])
    file = tmp_path / "plans.json"
    subprocess.run(["git", "archive", "-o", tmp_path / "it", "HEAD", "flux_megatron"], check=True)
    subprocess.run(["tar", "-x", "-C", tmp_path, "-f", tmp_path / "it"], check=True)
    there = digest.__wrapped__(tmp_path / "flux_megatron")
    file.write_text(f'{{"sources": "{there}"}}, {{"sources": "other"}}')
    main(file, "HEAD")
    assert file.read_text() == '{"sources": "today"}, {"sources": "other"}'
