"""Code is kept for the next run only while nothing that makes it changes. Needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import kept_code
import pytest

HERE = Path(__file__).parent
KERNEL = """
import triton
import triton.language as tl

@triton.jit
def called(x):
    return x + 1

@triton.jit
def kernel(x, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(x + at, called(tl.load(x + at)))
"""
KEY = """
import sys
import kernel_of_a_test
import kept_code
import torch
from flux_megatron.kernels.triton_launch import Code

size, architecture = map(int, sys.argv[1:])
code = Code("kernel_of_a_test", "kernel", (torch.float32, size), (("num_warps", 4),))
print(kept_code._key(code, architecture))
"""


def key(folder: Path, source: str = KERNEL, size: int = 32, architecture: int = 90) -> str:
    """As a script finds it."""
    folder.mkdir()
    (folder / "kernel_of_a_test.py").write_text(source)
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(HERE), *sys.path])
    command = [sys.executable, "-c", KEY, str(size), str(architecture)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> str:
    return key(tmp_path_factory.mktemp("first") / "kernel")


def test_the_same_kernel_is_found_again(tmp_path, first):
    assert key(tmp_path / "kernel") == first


@pytest.mark.parametrize(
    "changes",
    [
        {"source": KERNEL.replace("x + 1", "x + 2")},
        {"source": KERNEL.replace("(tl.load", "(-tl.load")},
        {"size": 64},
        {"architecture": 100},
    ],
    ids=["a function that it calls", "its source", "the launch", "the GPU"],
)
def test_what_has_changed_is_compiled_again(tmp_path, first, changes):
    assert key(tmp_path / "kernel", **changes) != first


def test_only_results_of_the_same_key_are_taken(tmp_path, monkeypatch):
    file = tmp_path / "last.json"
    file.write_text(json.dumps({"a kernel": {"key": "known", "ptx": "kept"}}))
    monkeypatch.setenv(kept_code.LAST, str(file))
    kept_code._last_results.cache_clear()
    try:
        for known, ptx in (("known", "kept"), ("another", "made")):
            monkeypatch.setattr(kept_code, "_key", lambda *_, known=known: known)
            given = kept_code.compiled_or_kept(None, 90, lambda: {"ptx": "made"})
            assert given == {"key": known, "ptx": ptx}
    finally:
        kept_code._last_results.cache_clear()


def test_a_changed_script_forgets_all(monkeypatch, tmp_path):
    before = kept_code._scripts.__wrapped__()
    (tmp_path / "compile_other.py").write_text("")
    monkeypatch.setattr(kept_code, "HERE", tmp_path)
    assert kept_code._scripts.__wrapped__() != before
