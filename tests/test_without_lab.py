"""The product without the laboratory: a copy of the package that lacks `flux_megatron.lab`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flux_megatron import lab_commands

ROOT = Path(__file__).parents[1]
# Every module of the package; of another package any may be missing.
IMPORT_ALL = """
import importlib, pkgutil, flux_megatron, flux_megatron.nn, flux_megatron.integration
assert flux_megatron.__file__.startswith({folder!r}), flux_megatron.__file__
names = [one.name for one in pkgutil.walk_packages(flux_megatron.__path__, "flux_megatron.")]
for name in names:
    try:
        if not name.endswith("__main__"):
            importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert error.name.split(".")[0] != "flux_megatron", (name, error)
print(len(names))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the copy is."""
    folder = tmp_path_factory.mktemp("product")
    but = shutil.ignore_patterns("lab", "__pycache__")
    shutil.copytree(ROOT / "flux_megatron", folder / "flux_megatron", ignore=but)
    shutil.copytree(ROOT / "patches", folder / "flux_megatron" / "patches")
    return folder


def ran(folder: Path, *words: str, path: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*path, folder)))}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=200,
    )  # fmt: skip


def test_every_module_of_the_product_can_be_imported(folder):
    done = ran(folder, "-c", IMPORT_ALL.format(folder=str(folder)))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) > 150


def test_an_operation_has_its_help(folder):
    done = ran(folder, "-c", "import flux_megatron; help(flux_megatron.gemm_reduce_scatter)")
    assert done.returncode == 0, done.stderr
    assert "gemm_reduce_scatter(" in done.stdout


@pytest.mark.parametrize("command", ["run", "launch", "doctor", "patch", "tune"])
def test_commands_of_the_product_work(folder, command):
    done = ran(folder, "-m", "flux_megatron", command, "--help")
    assert done.returncode == 0, done.stderr
    assert "sage: " in done.stdout


def test_help_lists_what_is_installed(folder):
    done = ran(folder, "-m", "flux_megatron", "--help")
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert {"run", "launch", "doctor", "patch", "tune"} <= {*words}
    assert not {*lab_commands.PLACES} & {*words}


@pytest.mark.parametrize(("command", "extra"), [("train", "train"), ("bench", "lab")])
@pytest.mark.parametrize("typer", [True, False], ids=["", "no typer"])
def test_a_command_of_the_laboratory_says_that_it_is_not_installed(
    folder, tmp_path, command, extra, typer
):
    if not typer:
        error = "raise ModuleNotFoundError('No module named typer', name='typer')"
        (tmp_path / "typer.py").write_text(error)
    done = ran(folder, "-m", "flux_megatron", command, "--help", path=(tmp_path,))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"flux-megatron {command}: flux_megatron.lab, which has this command, is not installed: "
        f"in a checkout of flux_megatron, pip install -e '.[{extra}]'\n"
    )


def test_every_command_of_the_laboratory_is_where_it_is_said_to_be():
    for command in lab_commands.PLACES:
        assert lab_commands.is_installed(command)
        assert lab_commands.load(command)
