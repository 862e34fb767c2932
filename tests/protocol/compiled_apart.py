"""Compiled kernels for tests: by a script in a process of its own, without the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import fake_driver
import kept_code
import pytest
import torch

from flux_megatron.versions.triton import TRITON

# whole calls, on a driver that is pretended
NEEDS_OFFLINE_CALLS = [
    pytest.mark.skipif(not TRITON.since("3.6"), reason="this Triton has no Gluon for Hopper"),
    pytest.mark.skipif(not fake_driver.compiler(), reason="no C compiler"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="this torch loads a driver itself"),
]
SHARED_BYTES_MAX = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}


def compiled_by(script: str, folder: Path) -> dict[str, dict]:
    """What `script`, a file beside this one, writes to the file that it is given: its kernels. What
    has not changed since its last run is not compiled again.
    """
    here, written = Path(__file__).parent, folder / "compiled.json"
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    environment[kept_code.LAST] = str(kept_code.last_results_of(script))
    environment["PYTHONPATH"] = os.pathsep.join([str(here.parents[1]), *sys.path])
    command = [sys.executable, str(here / script), str(written)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert run.returncode == 0, run.stderr[-4000:]
    kept_code.keep(written, script)
    return json.loads(written.read_text())


def check_shared_memory(compiled: dict[str, dict]) -> None:
    """A CTA has it, on the GPU with which a kernel's name begins; else on sm_90."""
    for name, kernel in compiled.items():
        most = SHARED_BYTES_MAX.get(name.split()[0], SHARED_BYTES_MAX["sm_90"])
        assert kernel["shared_bytes"] <= most, name


def named(compiled: dict[str, dict], *words: str) -> dict[str, dict]:
    """Those whose names have all these words."""
    found = {name: k for name, k in compiled.items() if all(w in name.split() for w in words)}
    assert found, f"nothing was compiled for {words}"
    return found
