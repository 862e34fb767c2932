"""Which versions were run, and what is said of others."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from flux_megatron.versions import library
from flux_megatron.versions.library import Library, release, warn_of_untested
from flux_megatron.versions.megatron_core import MEGATRON_CORE
from flux_megatron.versions.python import PYTHON
from flux_megatron.versions.torch import TORCH
from flux_megatron.versions.transformer_engine import TRANSFORMER_ENGINE
from flux_megatron.versions.triton import TRITON, run_expands_descriptors, runs_directly

CHECKOUT = Path(__file__).parents[1]
ALL = (PYTHON, TORCH, TRITON, MEGATRON_CORE, TRANSFORMER_ENGINE)
# besides `versions`: what is written into rows and keys of measurements, and shown
READS_VERSIONS = {
    "lab/bench/competitors/async_tp.py", "doctor/packages.py", "tuning/environment.py",
}  # fmt: skip


def test_a_release_is_two_numbers():
    versions = ("2.15.0+cu132", "3.9.0a0+git1", "0.20.0rc0", "3.1")
    assert [*map(release, versions)] == [(2, 15), (3, 9), (0, 20), (3, 1)]


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.distribution)
def test_newer_than_what_was_run_is_untested(one):
    major, minor = release(one.newest)
    assert one.untested(f"{major}.{minor}.99") is None
    assert one.untested(f"{major}.{minor + 1}.0").startswith(one.distribution)
    assert one.untested(f"{major + 1}.0.0+cu150").endswith(f"{one.newest}, the newest that was run")
    assert one.untested("of an unknown version") is None
    assert release(one.oldest) <= release(one.newest)


@pytest.fixture
def torch_3(monkeypatch) -> Library:
    monkeypatch.setitem(library.sys.modules, "torch", SimpleNamespace(__version__="3.0.1"))
    monkeypatch.setattr(library, "_warned", set())
    return TORCH


@pytest.mark.filterwarnings("error")
def test_rank_0_warns_once(torch_3, monkeypatch):
    nowhere = Library("no such package", "no_such_module", "1.0", "1.0")
    monkeypatch.setenv("RANK", "1")
    warn_of_untested(torch_3)
    monkeypatch.delenv("RANK")
    library._warned.clear()
    with pytest.warns(UserWarning, match=r"torch 3\.0\.1 is newer than 2\.15"):
        warn_of_untested(torch_3, nowhere)
    warn_of_untested(torch_3, nowhere)
    warn_of_untested(TRITON, MEGATRON_CORE, TRANSFORMER_ENGINE)  # which were run


@pytest.mark.parametrize(
    ("version", "directly", "expands"),
    [("3.5.1", False, True), ("3.6.0", True, False), ("3.7.1", True, True), ("3.9.0", True, True),
     ("3.10.0", False, True)],
)  # fmt: skip
def test_how_a_triton_launches(monkeypatch, version, directly, expands):
    monkeypatch.setitem(library.sys.modules, "triton", SimpleNamespace(__version__=version))
    assert (runs_directly(), run_expands_descriptors()) == (directly, expands)


def test_the_package_asks_for_all_that_was_run_and_forbids_nothing_newer():
    project = (CHECKOUT / "pyproject.toml").read_text()
    core = re.search(r"^dependencies = \[(.*?)\]", project, re.M | re.S)[1]
    assert re.findall(r'"(\w+)([^";]*)', core) == [
        ("torch", f">={TORCH.oldest}"), ("triton", f">={TRITON.oldest}")
    ]  # fmt: skip
    assert f'requires-python = ">={PYTHON.oldest}"' in project


def test_no_other_file_compares_versions():
    compares = re.compile(r"(?<!flux_megatron)\b\w+\.__version__|version_info|PkgVersion\(\"[1-9]")
    package = CHECKOUT / "flux_megatron"
    found = {
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        if file.parent.name != "versions" and compares.search(file.read_text())
    }
    assert found <= READS_VERSIONS, found - READS_VERSIONS
