"""The DLRM of scripts/dlrm.py: fused and unfused it has the same losses, and it learns."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
from races import agreed
from ranks import here, on_device_ranks

import flux_megatron

SCRIPT = Path(__file__).parents[1] / "scripts" / "dlrm.py"
STEPS = 20


def script():
    spec = importlib.util.spec_from_file_location("dlrm", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@on_device_ranks(2)
def test_losses_are_equal(rank):
    dlrm = script()
    lines = dlrm.generated(64)
    options = {"batch": 32, "rows": 50, "D": 12, "lr": 0.2}
    plain = dlrm.train(lines, "sequential", here(), steps=STEPS, **options)
    fused = dlrm.train(lines, "fused", here(), steps=STEPS, **options)
    counted = {("embedding_a2a", name): 2 * STEPS for name in ("fused", "sequential")}
    assert flux_megatron.report().calls == counted
    agreed((plain, fused))  # all ranks have the loss of the whole batch
    assert fused == pytest.approx(plain, rel=0, abs=dlrm.CLOSE)
    assert sum(fused[-4:]) < 0.9 * sum(fused[:4])
    assert abs(fused[0] - fused[1]) > 10 * dlrm.CLOSE  # steps differ by more than strategies
    sparse = dlrm.train(lines, "fused", here(), steps=4, **options, sparse=True)
    assert sparse == pytest.approx(plain[:4], rel=0, abs=dlrm.CLOSE)


def test_a_line_is_read_as_criteo_writes_it():
    fields = ["1", *["3", "", "-2"], *[""] * 10, "0000000a", "", *["ff000001"] * 24]
    labels, dense, indices, offsets = script().batch_of(
        ["\t".join(fields) + "\n"] * 2, slice(0, 3), slice(1, 2), 7
    )
    assert labels.tolist() == [1.0]
    assert dense[0, :3].tolist() == pytest.approx([math.log(4), 0, 0])
    assert offsets.tolist() == [0, 1, 2, 2, 2, 3, 4]  # table by table, the second one empty
    assert indices.tolist() == [3, 3, 0xFF000001 % 7, 0xFF000001 % 7]


def test_generated_lines_have_the_format():
    lines = script().generated(5)
    assert lines == script().generated(5)
    for line in lines:
        label, *rest = line.split("\t")
        assert label in "01"
        assert len(rest) == 39
        assert all(len(text) in (0, 8) for text in rest[13:])
