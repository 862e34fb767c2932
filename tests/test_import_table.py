"""The import table: which room of the package may import which, and what from outside.

Rooms are the modules and packages directly under `flux_megatron` and `flux_megatron.lab`; "" is the
package's `__init__`. Imports in functions and those for type checkers count like any other, unless
the table says "lazily".
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path
from typing import NamedTuple, TypeGuard

import pytest

PACKAGE = "flux_megatron"
SOURCE = Path(__file__).parents[1] / PACKAGE
LAB = "lab"  # the laboratory; all else is the product
BASE = "errors patterns problem settings version"


class Room(NamedTuple):
    """What a room may import: our modules and all below them, packages, packages in functions."""

    ours: str = ""
    packages: str = ""
    lazily: str = ""


# No room imports the package itself, `__init__`: it is for users. Errors are for all to raise and
# catch.
TABLE = {
    "settings": Room(),
    "version": Room(),
    # a look at what torch has; nothing when it is loaded
    "versions": Room(lazily="torch"),
    "errors": Room(),
    "command_errors": Room("errors"),  # how a command ends, where only the core is installed
    # the laboratory's commands by name: the command line works without them
    "lab_commands": Room(f"command_errors errors {LAB}"),
    "command_group": Room("command_errors lab_commands", "typer"),
    "patterns": Room(),
    "problem": Room("patterns"),
    "scaling": Room(packages="torch"),  # FP8's scales go from a call's checks down to the kernels
    "config_files": Room("errors", "yaml"),
    "option_values": Room("errors"),  # what any command may be given
    "machine": Room("errors"),  # the GPUs of this machine, counted without torch
    # `python -m flux_megatron.launch` becomes a rank of a training run: see AT_IMPORT
    "launch": Room(
        "config_files errors machine option_values problem version versions.python "
        "integration.arguments integration.bootstrap integration.cpu_pretrain",
        "jinja2 pydantic typer yaml",
    ),
    "wgrad": Room("", "torch", lazily="fused_weight_gradient_mlp_cuda"),
    # its list of driver calls is compiled as Triton compiles its launchers
    "symm": Room("errors problem scaling settings versions", "torch", lazily="cuda triton"),
    # Triton's interpreter is written in numpy; compiled kernels never load it.
    # A launch goes into a list of driver calls.
    "kernels": Room(
        "errors problem scaling settings symm.channel symm.enqueue symm.program symm.recent"
        " symm.signals versions",
        "torch triton",
        lazily="numpy",
    ),
    "overlap": Room("errors patterns problem scaling settings symm kernels", "torch"),
    # it measures what `overlap` runs; what a measured plan depends on: Triton's version and the
    # link between the GPUs; which tiles are split, for a prediction of them
    "tuning": Room(
        "errors patterns problem settings symm kernels.sizes kernels.triton_launch overlap wgrad",
        "torch",
        lazily="cuda triton",
    ),
    "dispatch": Room(
        "errors problem scaling settings symm.groups symm.workspace overlap.operands"
        " overlap.registry overlap.report"
        " tuning.choice tuning.environment",
        "torch",
    ),
    "ops": Room("errors problem scaling overlap dispatch symm.groups", "torch"),
    # for rows that are counted on the device: what `ops` and `overlap` do for the others
    "expert_parallel": Room(
        "errors problem settings dispatch symm kernels overlap tuning versions ops", "torch"
    ),
    # pooling is no GEMM of x and w: it has operands, checks and strategies of its own
    "embedding": Room("errors settings symm kernels overlap ops", "torch"),
    # what users build kernels of their own from: names for `kernels` and `overlap.transfer`
    "device": Room("errors symm kernels overlap", "torch triton"),
    "nn": Room("errors ops patterns wgrad kernels.norm embedding", "torch"),
    # apex's kernel for the weight gradient, where it is installed; whether this Megatron is one
    # that was recorded; what a run counts, and the end of its steps
    "integration": Room(
        "errors settings ops nn wgrad scaling expert_parallel patching.installed overlap.report "
        "symm.step versions",
        "torch megatron transformer_engine transformer_engine_torch",
        lazily="fused_weight_gradient_mlp_cuda",
    ),
    # measures ahead of a run, on ranks that it starts; the names of Megatron's options
    "tune_command": Room(
        "command_errors errors machine option_values patterns problem settings expert_parallel "
        "launch.parser_signature overlap.registry symm.workspace tuning",
        "torch typer rich",
    ),
    "specs": Room("integration.spec_argument"),  # the name that Megatron's --spec is given
}
BELOW = " ".join(TABLE)
# The laboratory. It may import the product, and of the product only the command line may import it.
LABORATORY = {
    LAB: Room(),
    "lab.reference": Room("patterns", "torch"),
    "lab.train": Room(
        "command_errors config_files errors option_values settings integration "
        "launch.schema overlap.report symm.step",
        "torch megatron matplotlib numpy pydantic typer",
    ),
    # decodes what `train` has trained, in ranks that `train` starts
    "lab.generate": Room(
        "command_errors errors launch.schema option_values overlap.report symm.step lab.train",
        "torch megatron pydantic typer",
    ),
    # what runs have logged, and what they were to be: read and predicted where they are submitted
    "lab.results": Room(
        "errors launch option_values lab.perf", "scipy typer", lazily="matplotlib rich"
    ),
    "lab.perf": Room("errors launch.memory launch.workload patterns problem", "pydantic"),
    "lab.simulate": Room(
        "config_files errors launch option_values lab.perf", "typer", lazily="rich"
    ),
    # beside other libraries
    "lab.bench": Room(f"{BELOW} lab.reference", "*"),
    "lab.measure": Room(f"{BELOW} lab.bench lab.results", "*"),
}
TABLE |= LABORATORY
TABLE |= {
    "": Room(BELOW),
    "doctor": Room(BELOW, "*"),
    # runs on a node before the ranks, and once as ranks of its own
    "preflight": Room(packages="torch"),
    # reads Megatron's sources as text: it works where neither torch nor megatron can be imported
    "patching": Room("errors", "typer"),
    "cli": Room(f"{BELOW} doctor patching", "*"),
    "__main__": Room("command_errors lab_commands version cli doctor"),
}
BY_NAME = {"importlib.import_module", "import_module", "__import__"}
# These must start fast on any machine: outside functions they import no more than this.
AT_IMPORT = {
    "": Room(BASE),
    "launch": Room(
        "config_files version errors machine option_values problem", "jinja2 pydantic typer yaml"
    ),
    "doctor": Room(f"{BASE} command_errors option_values versions"),
    "__main__": Room("command_errors errors lab_commands version"),
    "lab_commands": Room("command_errors errors"),
    "cli": Room(
        f"{BASE} command_errors command_group doctor launch.commands option_values patching "
        "tune_command.commands versions",
        "rich typer",
    ),
}


def allows(names: str, name: str) -> bool:
    return any(n == "*" or f"{name}.".startswith(f"{n}.") for n in names.split())


def module_name(package: Path, dotted: str) -> str:
    """The longest part of `flux_megatron.a.b.attribute` that is a module, less the first name."""
    found, folder = "", package
    for part in dotted.split(".")[1:]:
        if not ((folder / part).is_dir() or (folder / f"{part}.py").is_file()):
            break
        found, folder = f"{found}.{part}".lstrip("."), folder / part
    return found or "__init__"


def imported_names(node: ast.AST, package_of_file: str) -> list[str]:
    """Absolute dotted names that a statement imports; `from a import b` gives `a.b`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = resolve_name("." * node.level + (node.module or ""), package_of_file)
        return [f"{base}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func) in BY_NAME:
        texts = [a for a in node.args[:1] if isinstance(a, ast.Constant)]
        return [str(text.value) for text in texts if not names_laboratory(text)]
    return [str(node.value)] if names_laboratory(node) else []


def names_laboratory(node: ast.AST) -> TypeGuard[ast.Constant]:
    """A text, or part of one, that may be started or imported: what of the product names it?"""
    return isinstance(node, ast.Constant) and str(node.value).startswith(f"{PACKAGE}.{LAB}")


def imports(file: Path, package: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, absolute dotted name, whether loading the file skips it) of every import of a file."""
    tree = ast.parse(file.read_text(), file.name)
    deferred = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    blocks = [n for n in ast.walk(tree) if isinstance(n, deferred) or for_type_checkers(n)]
    inside = {id(n) for block in blocks for n in ast.walk(block)}
    package_of_file = ".".join([PACKAGE, *file.relative_to(package).parent.parts])
    for node in ast.walk(tree):
        for name in imported_names(node, package_of_file):
            yield node.lineno, name, id(node) in inside or names_laboratory(node)


def room_of(module: str) -> str:
    """The room of a module, less the first name: `lab.train` of `lab.train.loop`."""
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] == LAB else 1])


def for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def is_allowed(rules: Room, target: str, package: Path, lazy: bool) -> bool:
    if target.split(".")[0] == PACKAGE:
        return allows(rules.ours, module_name(package, target))
    return allows(rules.packages, target) or (lazy and allows(rules.lazily, target))


def violations(package: Path) -> list[str]:
    """Every import under `package` that the table does not allow, as `file:line room -> target`."""
    found = []
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package)
        name = room_of(".".join(path.with_suffix("").parts)).removesuffix("__init__").rstrip(".")
        if name not in TABLE:
            found.append(f"{path}: the table has no room {name!r}")
            continue
        for line, target, lazy in imports(file, package):
            top = target.split(".")[0]
            own = top == PACKAGE and room_of(module_name(package, target)) == name
            if own or top in sys.stdlib_module_names:
                continue
            rules = TABLE[name] if lazy else AT_IMPORT.get(name, TABLE[name])
            if not is_allowed(rules, target, package, lazy):
                found.append(f"{path}:{line} {name or '__init__'} -> {target}")
    return found


def test_every_import_is_in_the_table():
    assert not violations(SOURCE)


def test_the_product_may_import_nothing_of_the_laboratory():
    """The table itself, for whoever adds a row: only the command line names the laboratory."""
    product = TABLE.keys() - LABORATORY.keys()
    naming = {
        room for room in product if {*map(room_of, TABLE[room].ours.split())} & LABORATORY.keys()
    }
    assert naming == {"lab_commands"}


def test_every_room_of_the_package_is_seen():
    """The walk really looked at the package: the rooms that exist are rooms of the table."""
    files = [file.relative_to(SOURCE).with_suffix("") for file in SOURCE.rglob("*.py")]
    rooms = {room_of(".".join(file.parts)) for file in files} - {"lab.__init__"}
    assert {"__init__", "kernels", "overlap", "symm", "lab.results"} <= rooms
    assert rooms - {"__init__", "__main__"} <= TABLE.keys()


# each line: a file, and what it imports
BAD = """\
symm/buffer.py from flux_megatron.overlap import fused
symm/buffer.py from ..overlap import fused
symm/buffer.py def f(): import flux_megatron.overlap.fused
symm/buffer.py if TYPE_CHECKING: from flux_megatron.nn import functions
nn/functions.py importlib.import_module('flux_megatron.integration')
kernels/ag_gemm.py from flux_megatron.symm import buffer
ops.py from flux_megatron.symm import buffer
nn/functions.py from flux_megatron import report
lab/train/loop.py import flux_megatron
lab/train/loop.py from flux_megatron.cli import main
overlap/fused.py from flux_megatron.tuning import timing
nn/functions.py import megatron.core
lab/perf/cost.py import torch.distributed
launch/sbatch.py def f(): from torch import Tensor
launch/sbatch.py from flux_megatron.integration import bootstrap
overlap/fused.py import triton
kernels/ag_gemm.py import numpy
cli.py import torch
overlap/fused.py def f(): from flux_megatron.lab import bench
ops.py from flux_megatron.lab.train import loop
cli.py def f(): import flux_megatron.lab.train.loop
lab_commands.py import flux_megatron.lab.train.loop
nn/functions.py importlib.import_module('flux_megatron.lab.train.loop')
nn/functions.py if TYPE_CHECKING: from flux_megatron.lab.train import loop
launch/sbatch.py f = lambda room: [f'flux_megatron.lab.{room}.worker']
__init__.py from flux_megatron.nn import functions
helpers.py import os
"""
GOOD = """\
kernels/ag_gemm.py from flux_megatron.symm import signals
symm/buffer.py from . import signals
symm/buffer.py from flux_megatron.symm import signals
overlap/fused.py from flux_megatron.symm.buffer import SymmetricBuffer
nn/functions.py from flux_megatron.ops import all_gather_gemm
cli.py def f(): import torch
cli.py def f(): import flux_megatron.integration
lab_commands.py F = 'flux_megatron.lab.train'
lab/train/loop.py import flux_megatron.lab.train
__init__.py if TYPE_CHECKING: from flux_megatron.nn import functions
__init__.py def f(): import flux_megatron.nn
"""


@pytest.fixture
def tree(tmp_path):
    """A package with every room of the table and nothing in them."""
    package = tmp_path / PACKAGE
    for name in ("kernels/ag_gemm", "symm/buffer", "symm/signals", "overlap/fused", "nn/functions",
                 "integration/layers", "lab/train/loop", "lab/bench/suite", "lab/perf/cost",
                 "launch/sbatch", "ops", "cli", "__init__"):  # fmt: skip
        file = package / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return package


@pytest.mark.parametrize("line", BAD.splitlines())
def test_bad_import_is_caught(tree, line):
    path, source = line.split(maxsplit=1)
    (tree / path).write_text(source)
    (found,) = violations(tree)
    assert found.startswith(path)


@pytest.mark.parametrize("line", GOOD.splitlines())
def test_good_import_is_allowed(tree, line):
    path, source = line.split(maxsplit=1)
    (tree / path).write_text(source)
    assert violations(tree) == []


def loaded_after(code: str) -> set[str]:
    """Top-level modules of a fresh interpreter after it ran `code`."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True, text=True, cwd=SOURCE.parent, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_package_loads_nothing_heavy():
    modules = ", ".join(
        f"{PACKAGE}.{name}" for name in ("settings", "errors", "problem", "launch", "nn")
    )
    loaded = loaded_after(f"import {PACKAGE}, {modules}")
    assert not loaded & {"torch", "triton", "numpy", "megatron", "yaml", "pydantic", "rich"}


def test_what_is_heavy_would_be_noticed():
    assert "numpy" in loaded_after(f"import {PACKAGE}, numpy")


def test_importing_the_layers_below_megatron_touches_no_device_and_no_group():
    check = (
        "import torch\n"
        "assert not torch.cuda.is_initialized(), 'a CUDA context exists'\n"
        "assert not torch.distributed.is_initialized(), 'a process group exists'"
    )
    assert "megatron" not in loaded_after(f"import {PACKAGE}.nn.linear, {PACKAGE}.ops\n{check}")
