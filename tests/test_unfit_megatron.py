"""A Megatron-LM that cannot run is refused in one line, by every way in, before it is imported: one
that is too old, or whose data-set helper is missing.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from started import python
from typer.testing import CliRunner

from flux_megatron.cli import app
from flux_megatron.errors import BadInput
from flux_megatron.versions import megatron_core

ROOT = Path(__file__).parents[1]
SAID = "is too old: 0.14 to 0.19 are supported"
BY_ITS_IMPORT = "raise AttributeError('get_te_version')\n"


def checkout(folder: Path, release: str) -> Path:
    files = {
        "pretrain_gpt.py": BY_ITS_IMPORT,
        "megatron/training/__init__.py": BY_ITS_IMPORT,
        "megatron/core/__init__.py": BY_ITS_IMPORT,
        "megatron/core/package_info.py": "".join(
            f"{name} = {number}\n"
            for name, number in zip(("MAJOR", "MINOR", "PATCH"), release.split("."), strict=True)
        ),
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def old(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return checkout(tmp_path / "Megatron-LM", "0.8.0")


@pytest.mark.parametrize(
    "words",
    [
        "run --device cpu --nproc-per-node 2 Megatron-LM/pretrain_gpt.py --flux-overlap",
        "launch cpu/tiny-pretrain_gpt --local --run-dir new --megatron-lm Megatron-LM",
        "launch cpu/tiny-pretrain_gpt --run-dir new --megatron-lm Megatron-LM",
    ],
)
def test_commands_refuse_it_before_they_start_anything(old, words):
    done = CliRunner().invoke(app, words.split())
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == f"Megatron-LM 0.8.0 in {old} {SAID}\n"
    assert not Path("new").exists()


def test_doctor_says_that_and_nothing_else_of_it(old, monkeypatch):
    (old / "pretrain_gpt.py").write_text("import absent_six")  # which would not help
    line = f"missing Megatron-LM           0.8.0 in {old} is too old; 0.14 to 0.19 are supported\n"
    done = CliRunner().invoke(app, ["doctor", "--gpus", "0", "--quiet", "--megatron-lm", str(old)])
    assert (done.exit_code, done.stdout) == (1, line)
    monkeypatch.chdir(old)
    done = CliRunner().invoke(app, ["doctor", "--gpus", "0", "--quiet"])
    assert (done.exit_code, done.stdout) == (1, line)


@pytest.mark.parametrize(
    "program",
    [
        "import flux_megatron; flux_megatron.enable()",
        "import flux_megatron; flux_megatron.replace(None)",
        "import flux_megatron.specs",
        "import os; os.environ['FLUX_MEGATRON_ENABLE'] = '1'; import flux_megatron; "
        "from flux_megatron.integration import autoload; autoload._enable()",
        "from flux_megatron.launch.__main__ import main; main(['pretrain_gpt.py'])",
        "from flux_megatron.lab.train.commands import train; train('demo')",
    ],
)
def test_programs_get_the_same_error(old, program):
    path = os.pathsep.join([str(old), str(ROOT)])
    done = python("-c", program, code=None, folder=old, PYTHONPATH=path)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].endswith(f"Megatron-LM 0.8.0 in {old} {SAID}")


@pytest.fixture
def without_compiler(tmp_path, monkeypatch) -> Path:
    """A checkout whose helper cannot be compiled here."""
    folder = checkout(tmp_path / "Megatron-LM", "0.16.1")
    (folder / "megatron" / "core" / "datasets").mkdir()
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(folder)
    return folder


def test_a_run_without_the_data_set_helper_does_not_start(without_compiler):
    """Megatron would try to compile it when all ranks are there."""
    lacking = "no make, g++, python3, python3-config; "
    remedy = f"install g++, then pip install -e {without_compiler} compiles it"
    words = ["run", "--device", "cpu", "pretrain_gpt.py", "--flux-overlap"]
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == f"data set helper: {lacking}{remedy}\n"
    done = CliRunner().invoke(app, ["doctor", "--gpus", "0", "--quiet"])
    assert done.exit_code == 1
    assert f"data set helper       {lacking}{remedy}\n" in done.stdout


def test_the_release_beside_the_script_counts(tmp_path, monkeypatch):
    """And not the one that would be imported without it."""
    older, newer = checkout(tmp_path / "a", "0.13.1"), checkout(tmp_path / "b", "0.14.0")
    megatron_core.check(newer, older)
    with pytest.raises(BadInput, match=r"0\.13\.1 in .*a is too old"):
        megatron_core.check(tmp_path / "none", older, newer)
    (newer / megatron_core.PACKAGE_INFO).write_text("MAJOR = 1\n")
    assert megatron_core.version_in(newer) is None
    assert megatron_core.version_in(Path("x" * 256)) is None  # nor where it cannot be asked
