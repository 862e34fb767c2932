"""The digest of the sources follows what a strategy's calls run, by whatever Python it is taken."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flux_megatron.tuning import environment
from flux_megatron.tuning.environment import PACKAGE, sources_digest

FILES = {
    "kernels/__init__.py": "a = 0\n",
    "kernels/gemm.py": "from flux_megatron.kernels import tile\ndef f(x):\n    return x + 1\n",
    "kernels/tile.py": "b = 1\n",
    "kernels/narrow.py": "c = 1\n",
    "overlap/fused.py": "def f():\n    import flux_megatron.kernels.gemm\n",
    "overlap/wide.py": "from flux_megatron.kernels.narrow import c\n"
    "from flux_megatron.symm import d\n",
    "overlap/report.py": "z = 3\n",
    "symm/d.py": "e = f'{1!r:>{2}}' + \"a\" f'b'\n",
}


@pytest.fixture
def package(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "text", "stale"),
    [
        ("kernels/gemm.py", FILES["kernels/gemm.py"].replace("1", "2"), {"fused"}),
        ("kernels/gemm.py", f'"""Text."""\n{FILES["kernels/gemm.py"]}# more\n', set()),
        ("kernels/tile.py", "b = 2\n", {"fused"}),
        ("kernels/narrow.py", "c = 2\n", {"wide"}),
        ("kernels/__init__.py", "a = 1\n", {"fused", "wide"}),
        ("kernels/new.py", "g = 1\n", set()),
        ("overlap/fused.py", "y = 3\n", {"fused"}),
        ("overlap/report.py", "z = 4\n", set()),
        ("symm/d.py", "e = f'{1!r:>{3}}' + \"a\" f'b'\n", {"wide"}),
        ("symm/d.c", "int d = 1;\n", {"wide"}),
    ],
)
def test_an_edit_makes_stale_what_runs_it(package, file, text, stale):
    names = ("fused", "wide")
    before = {name: sources_digest(package, name) for name in names}
    everything = sources_digest(package)
    (package / file).write_text(text)
    assert {name for name in names if sources_digest(package, name) != before[name]} == stale
    run = file != "overlap/report.py" and text.count("#") == 0
    assert (sources_digest(package) != everything) == run


def test_every_strategy_runs_its_kernels_and_no_strategy_what_counts_or_chooses():
    files = environment._files(PACKAGE, "expert_parallel")
    codes = {file: environment._code(file.read_text()) for file in files}

    def runs(strategy: str, room: str = "overlap") -> set[str]:
        found = environment._imported(PACKAGE, codes, PACKAGE / room / f"{strategy}.py")
        return {str(file.relative_to(PACKAGE)) for file in found}

    assert "kernels/hopper_ag_gemm.py" in runs("hopper")
    assert "kernels/ag_gemm.py" in runs("fused") - runs("hopper") - runs("pipelined")
    assert "overlap/transfer.py" in runs("pipelined") - runs("sequential")
    assert "symm/channel.py" in runs("sequential")
    everything = runs("hopper") | runs("fused") | runs("pipelined") | runs("sequential")
    assert not {Path(name).stem for name in everything} & environment.NOT_RUN
    experts = runs("fused", "expert_parallel")
    assert {"kernels/gemm_a2a.py", "expert_parallel/fused.py"} <= experts
    assert "expert_parallel/fused.py" not in everything


ALONE = """
import sys, types
torch = types.ModuleType("torch")
torch.device = object
sys.modules["torch"] = torch
for name in ("flux_megatron", "flux_megatron.tuning"):
    sys.modules[name] = types.ModuleType(name)
import importlib.util
from pathlib import Path
name = "flux_megatron.tuning.environment"
spec = importlib.util.spec_from_file_location(name, sys.argv[1] + "/tuning/environment.py")
module = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
for strategy in (None, "fused", "hopper"):
    print(module.sources_digest(Path(sys.argv[1]), strategy))
"""


def interpreter(version: str) -> str | None:
    """A Python of that version, on the path or where pyenv keeps them."""
    kept = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python3"))
    return str(kept[-1]) if kept else shutil.which(f"python{version}")


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_every_python_gives_the_same_digest(version):
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    ran = subprocess.run(
        [python, "-c", ALONE, str(PACKAGE)], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == [sources_digest(PACKAGE, s) for s in (None, "fused", "hopper")]


def test_what_python_writes_of_a_tree_itself_differs_by_version():
    """So neither of its own texts would do: 3.12 has fields that 3.11 has not."""
    function = environment.ast.parse("def f(): pass").body[0]
    assert ("type_params" in function._fields) == (sys.version_info >= (3, 12))
    assert "type_params" not in environment._text(function)
