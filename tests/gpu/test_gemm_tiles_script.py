"""The race of tiles in small, and that it times no wrong GEMM."""

from __future__ import annotations

import gemm_tiles as script
import pytest
import torch
from ranks import DEVICE, on_device

# On GPUs the weights of a shape are more than L2 holds: large ones are fewer.
SMALL = [f"{'256x2048x2048' if DEVICE == 'cuda' else '48x40x32'} {one}" for one in ("nt", "nn")]
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # ours take no fp32


def _rows(rank) -> list[dict]:
    return [
        row
        for text in SMALL
        for row in script.measure(script.Shape.of(text), torch.device(DEVICE), 2, DTYPE)
    ]


def test_rows_of_all_candidates():
    (rows,) = on_device(_rows, 1)
    assert {row["layout"] for row in rows} == {"nt", "nn"}
    assert all(row["median_us"] > 0 and len(row["times_us"]) == 2 for row in rows)
    assert script.line(rows[:1]).startswith(SMALL[0])


def test_a_wrong_gemm_is_not_timed(monkeypatch):
    monkeypatch.setattr(
        script.Operands, "candidates",
        lambda self, device: {"library": self.library, "256": lambda w: self.library(w) + 1},
    )  # fmt: skip
    with pytest.raises(ArithmeticError, match="tiles of 256: 1920 numbers are wrong"):
        next(script.measure(script.Shape.of("48x40x32 nt"), torch.device(DEVICE), 1, DTYPE))


def test_tiles_are_made_in_other_groups_too():
    operands = script.Operands(script.Shape(8, 8, 8, "nt"), torch.device("cpu"), DTYPE, (4, 24))
    assert operands.tiles["128x192, groups of 24"].group_m == 24
    assert operands.tiles["128x256, groups of 4"].num_stages == 4
    assert {*script.NAMED} < {*operands.tiles}


def test_the_shapes_are_those_of_the_models():
    shapes = script.shapes_of_models(4, (2048,))
    assert script.Shape.of("2048x3072x12288 nn") in shapes
    assert len({*shapes}) == len(shapes) == 14
