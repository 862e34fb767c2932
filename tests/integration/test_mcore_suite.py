"""Megatron-LM's own tests of tensor parallelism: what passes with its layers passes with ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHECKOUT = os.environ.get("FLUX_MEGATRON_LM")
RANKS = torch.cuda.device_count() if torch.cuda.is_available() else 8


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not CHECKOUT, reason="FLUX_MEGATRON_LM names no checkout of Megatron-LM")
def test_what_passes_with_stock_passes_with_ours(tmp_path):
    stock, ours = (_outcomes(layers, tmp_path / layers) for layers in ("stock", "flux"))
    assert len(stock) == len(ours) == RANKS
    for with_stock, with_ours in zip(stock, ours, strict=True):
        passing = {test for test, outcome in with_stock.items() if outcome == "passed"}
        # they want a tensor-parallel size of 4
        assert RANKS < 4 or any("test_initialization" in test for test in passing)
        assert not {
            test: with_ours.get(test) for test in passing if with_ours.get(test) != "passed"
        }


def _outcomes(layers: str, folder: Path) -> list[dict[str, str]]:
    folder.mkdir()
    here = Path(__file__).parent
    path = [str(here), str(here.parents[1]), str(CHECKOUT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS),
        "--standalone", "--redirects", "3", "--log-dir", str(folder / "log"),
        "-m", "pytest", "-p", "mcore_plugin", "--layers", layers, "--outcomes", str(folder),
        "-o", "addopts=", "-p", "no:cacheprovider", "--timeout", "120", "-q", "-W", "ignore",
        "tests/unit_tests/tensor_parallel",
    ]  # fmt: skip
    with (folder / "torchrun.log").open("w") as log:
        run = subprocess.Popen(command, cwd=CHECKOUT, env=environment, stdout=log, stderr=log)
        try:
            run.wait(timeout=280)
        finally:
            run.terminate()  # torchrun stops its ranks then
            run.wait(timeout=60)
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
