"""The digest of the sources follows what calls run."""

from __future__ import annotations

import pytest

from flux_megatron.tuning.environment import PACKAGE, ROOMS, sources_digest


@pytest.mark.parametrize(
    ("file", "stale"),
    [
        ("kernels/gemm.py", True),
        ("kernels/new.py", True),
        ("overlap/fused.py", True),
        ("expert_parallel/fused.py", True),
        ("symm/enqueue.c", True),
        ("symm/notes.txt", False),
        ("nn/linear.py", False),
    ],
)
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
