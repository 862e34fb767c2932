"""A megatron-core too old for `train` and `generate` is refused in one line, before any rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pydantic", reason="needs the extra `train`")

from flux_megatron.lab.train import megatron_version

ROOT = Path(__file__).parents[1]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Lets this process and its children find a megatron-core of a version alone."""

    def install(version: str) -> None:
        core = tmp_path / "megatron" / "core"
        core.mkdir(parents=True)
        numbers = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
        (core / "package_info.py").write_text("".join(f"{n} = {v}\n" for n, v in numbers))
        (core / "__init__.py").touch()
        (core.parent / "__init__.py").touch()
        for name in [n for n in sys.modules if n.partition(".")[0] == "megatron"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")

    return install


@pytest.mark.parametrize("version", ["0.15.0", "0.19.2", "1.0.0"])
def test_newer_ones_pass(installed, version):
    installed(version)
    megatron_version.check()


def test_without_any_imports_are_left_to_say_so(monkeypatch):
    monkeypatch.setattr(megatron_version.importlib.util, "find_spec", lambda name: None)
    megatron_version.check()


def test_the_command_ends_in_one_line(installed, tmp_path):
    installed("0.14.0")
    command = [sys.executable, "-m", "flux_megatron.cli", "train", "--config"]
    done = subprocess.run(
        [*command, ROOT / "configs/train/demo.yaml", "--out", tmp_path / "out"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "megatron-core 0.14.0 given" in line
    assert not (tmp_path / "out").exists()
