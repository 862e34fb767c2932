"""Megatron-LM's own tests: what passes with its layers passes with ours, and how we count that."""

from __future__ import annotations

import json
import os

import mcore_suite
import pytest
from started import python

CHECKOUT = os.environ.get("FLUX_MEGATRON_LM")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not CHECKOUT, reason="FLUX_MEGATRON_LM names no checkout of Megatron-LM")
def test_what_passes_with_stock_passes_with_ours(tmp_path):
    """Some quick ones; mcore_suite.py as a command runs all."""
    files = ["tensor_parallel/test_initialization.py", "transformer/test_transformer_layer.py"]
    out = tmp_path / "rows.jsonl"
    words = ("--megatron", CHECKOUT, "--out", out, "--files", *files)
    python(mcore_suite.__file__, *words, limit_s=800)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == len(files)
    for row in rows:
        assert row["not_ours"] == []
        assert row["ours"] == row["stock"] > 0
    assert rows[-1]["forwards"] > 0
