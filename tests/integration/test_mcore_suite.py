"""Megatron-LM's own tests: what passes with its layers passes with ours, and how we count that."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import mcore_plugin
import mcore_suite
import pytest
import torch

CHECKOUT = os.environ.get("FLUX_MEGATRON_LM")
TESTS = """
import os
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig

RANK = int(os.environ["RANK"])


def layer():
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl")
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, use_cpu_initialization=True,
        tensor_model_parallel_size=2, sequence_parallel=True,
    )
    return ColumnParallelLinear(8, 4, config=config, init_method=torch.nn.init.zeros_)


def test_builds():
    layer()


def test_fails_on_one_rank():
    assert RANK == 0


def test_runs():
    y, _ = layer()(torch.ones(2, 1, 8, requires_grad=True))
    y.sum().backward()


def test_waits_for_a_rank_that_is_gone():
    layer()
    assert RANK == 1
    torch.distributed.barrier()


@pytest.mark.skip
def test_skipped():
    pass


def test_passes():
    pass
"""
NAMES = (
    "builds",
    "fails_on_one_rank",
    "runs",
    "waits_for_a_rank_that_is_gone",
    "skipped",
    "passes",
)
UTILITIES = "class Utils: rank = world_size = None"


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """A checkout with the tests above; the names of the tests. What they import is imported."""
    importlib.import_module("flux_megatron.integration.install")
    folder = tmp_path / "tests" / "unit_tests"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    (folder / "test_utilities.py").write_text(UTILITIES)
    (folder / "test_some.py").write_text(TESTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("FLUX_MEGATRON_STRATEGY", "pipelined")
    return [f"tests/unit_tests/test_some.py::test_{name}" for name in NAMES]


def _on_cpu(run, rank):
    from flux_megatron.train.cpu_device import pretend_cuda

    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    pretend_cuda()
    return BODY(run, rank)


BODY = mcore_suite._body


@pytest.mark.skipif(torch.cuda.is_available(), reason="forked ranks are for CPUs")
def test_outcomes_and_what_ran_are_reported(suite, tmp_path, monkeypatch):
    monkeypatch.setattr(mcore_suite, "_body", _on_cpu)
    stock = mcore_suite.outcomes(suite, "stock", 2, tmp_path, mcore_suite.forked)
    assert [stock[test]["outcome"] for test in suite] == [
        "passed", "failed", "passed", "failed", "skipped", "passed",
    ]  # fmt: skip
    assert {one["built"] for one in stock.values()} == {0}
    ours = mcore_suite.outcomes([suite[0], suite[2]], "flux", 2, tmp_path, mcore_suite.forked)
    expected = {"outcome": "passed", "built": 2, "forwards": 0, "backwards": 0}
    assert ours == {
        suite[0]: expected,
        suite[2]: expected | {"forwards": 2, "backwards": 2},
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests run on CPUs")
def test_ranks_of_torchrun_report_the_same(suite, tmp_path, monkeypatch):
    """But for NCCL: what `--gpus` starts, without this option of the plug-in."""
    conftest = "from flux_megatron.train.cpu_device import pretend_cuda\n\npretend_cuda()\n"
    (tmp_path / "tests" / "conftest.py").write_text(conftest)
    path = [str(tmp_path), *mcore_suite.PATH, *sys.path]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.setattr(mcore_suite, "GPUS", ())
    found = mcore_suite.outcomes(suite[2:3], "flux", 2, tmp_path, mcore_suite.by_torchrun)
    assert found == {suite[2]: {"outcome": "passed", "built": 2, "forwards": 2, "backwards": 2}}


def test_on_gpus_a_wait_for_a_rank_that_is_gone_is_bounded(monkeypatch):
    given = {}
    for name in ("init_process_group", "new_group"):
        monkeypatch.setattr(torch.distributed, name, lambda *_, **named: given.update(named))
    mcore_plugin._bounded_nccl()
    torch.distributed.init_process_group("nccl", rank=1, timeout=None)
    assert given["rank"] == 1
    assert given["timeout"].total_seconds() == mcore_plugin.PATIENCE_S


def test_ranks_that_say_nothing_end_with_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(mcore_suite, "_body", lambda run, rank: 4)
    found = mcore_suite.outcomes(["a", "b"], "stock", 2, tmp_path, mcore_suite.forked)
    assert {test: one["outcome"] for test, one in found.items()} == {"a": "failed", "b": "failed"}


@pytest.mark.parametrize(
    ("lines", "outcome"),
    [
        (("passed", "passed"), "passed"),
        (("passed", "failed"), "failed"),
        (("passed", "started"), "failed"),
        (("passed", "skipped"), "passed"),
        (("skipped", "skipped"), "skipped"),
    ],
)
def test_a_test_passes_if_no_rank_fails_it(lines, outcome, tmp_path):
    for rank, last in enumerate(lines):
        rows = [{"test": "t", "outcome": "started"}, {"test": "t", "outcome": last, "built": 3}]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{rank}.jsonl").write_text(text + '{"test": "t", "outc')
    merged = mcore_suite.merged(tmp_path, 2)
    assert merged == {"t": {"outcome": outcome, "built": 6, "forwards": 0, "backwards": 0}}


@pytest.mark.parametrize(
    ("rows", "status"),
    [([], 1), ([(0, [])], 1), ([(0, []), (3, [])], 0), ([(3, []), (3, ["a"])], 1)],
    ids=["no file", "none of ours", "good", "one fails"],
)
def test_a_suite_that_shows_nothing_fails(rows, status):
    found = [{"forwards": forwards, "not_ours": failed} for forwards, failed in rows]
    assert mcore_suite.status_of(found) == status


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not CHECKOUT, reason="FLUX_MEGATRON_LM names no checkout of Megatron-LM")
def test_what_passes_with_stock_passes_with_ours(tmp_path):
    """Some quick ones; mcore_suite.py as a command runs all."""
    files = ["tensor_parallel/test_initialization.py", "transformer/test_transformer_layer.py"]
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, str(Path(mcore_suite.__file__)), "--megatron", str(CHECKOUT)]
    subprocess.run([*command, "--out", str(out), "--files", *files], check=True, timeout=800)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == len(files)
    for row in rows:
        assert row["not_ours"] == []
        assert row["ours"] == row["stock"] > 0
    assert rows[-1]["forwards"] > 0
