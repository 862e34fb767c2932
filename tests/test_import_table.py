"""The import table: which room of the package may import which, and what from outside.

Rooms are the modules and packages directly under `flux_megatron` and `flux_megatron.lab`; "" is the
package's `__init__`. Imports in functions and those for type checkers count like any other, unless
the table says "lazily".
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path
from typing import NamedTuple, TypeGuard

import pytest
from started import python

PACKAGE = "flux_megatron"
SOURCE = Path(__file__).parents[1] / PACKAGE
LAB = "lab"  # the laboratory; all else is the product
BASE = "errors patterns problem settings version"


class Room(NamedTuple):
    """What a room may import: our modules and all below them, packages, packages in functions."""

    ours: str = ""
    packages: str = ""
    lazily: str = ""


def rooms(table: str) -> dict[str, Room]:
    """Rows of `room: our modules | packages | packages in functions`; indented lines go on."""
    rows = re.sub(r" *#.*", "", table).replace("\n    ", " ").split("\n")
    return {row.partition(":")[0]: Room(*row.partition(":")[2].split("|")) for row in rows if row}


# No room imports the package itself, `__init__`: it is for users. Errors are for all to raise and
# catch.
PRODUCT = rooms("""\
settings:
version:
versions: errors || torch  # a look at what torch has; nothing when it is loaded
errors:
command_errors: errors  # how a command ends, where only the core is installed
# the laboratory's commands by name: the command line works without them
lab_commands: command_errors errors lab
command_group: command_errors lab_commands | typer
patterns:
problem: patterns
scaling: | torch  # FP8's scales go from a call's checks down to the kernels
shipped:  # where configs and patches lie
config_files: errors | yaml
option_values: errors  # what any command may be given
machine: errors  # the GPUs of this machine, counted without torch
# `python -m flux_megatron.launch` becomes a rank of a training run: see AT_IMPORT
launch: config_files errors machine option_values problem shipped version versions.megatron_core
    lab_commands integration.arguments integration.bootstrap integration.parser_signature
    | jinja2 pydantic typer yaml
wgrad: | torch | fused_weight_gradient_mlp_cuda
# its list of driver calls is compiled as Triton compiles its launchers
symm: errors problem scaling settings versions | torch | cuda triton
# Triton's interpreter is written in numpy; compiled kernels never load it. A launch goes into a
# list of driver calls.
kernels: errors problem scaling settings symm.channel symm.enqueue symm.program symm.lru_cache
    symm.copies symm.signals symm.steps versions | torch triton | numpy
overlap: errors patterns problem scaling settings symm kernels | torch
# it measures what `overlap` runs; what a measured plan depends on: Triton's version and the link
# between the GPUs; which tiles are split, for a prediction of them
tuning: errors patterns problem scaling settings shipped symm kernels.compiled_ahead kernels.sizes
    kernels.triton_launch overlap wgrad | torch | cuda triton
dispatch: errors problem scaling settings symm.groups symm.program symm.workspace symm.workspaces
    overlap.calls overlap.operands overlap.registry overlap.report tuning.choice
    tuning.environment | torch
operators: problem scaling overlap.differentiable symm.groups | torch
ops: problem scaling settings overlap dispatch operators symm.groups | torch
pieces: problem scaling overlap dispatch | torch
# for rows that are counted on the device: what `ops` and `overlap` do for the others
expert_parallel: errors problem settings dispatch symm kernels overlap tuning versions | torch
# pooling is no GEMM of x and w: it has operands, checks and strategies of its own
embedding: errors settings dispatch symm kernels overlap | torch
# what users build kernels of their own from: names for `kernels` and `overlap.transfer`
device: errors symm kernels overlap | torch triton
nn: errors ops pieces patterns wgrad kernels.norm embedding | torch
# apex's kernel for the weight gradient, where it is installed; whether this Megatron is one that
# was recorded; what a run counts, and the end of its steps
integration: command_errors errors settings ops pieces nn wgrad scaling expert_parallel
    patching.installed overlap.report symm.step_end versions | torch megatron
    transformer_engine transformer_engine_torch | fused_weight_gradient_mlp_cuda
# measures ahead of a run, on ranks that it starts; the names of Megatron's options
tune_command: command_errors errors machine option_values patterns problem settings
    expert_parallel integration.parser_signature overlap.registry symm.workspaces tuning
    | torch typer rich
specs: versions.megatron_core integration.spec_argument  # the name that Megatron's --spec is given
""")
BELOW = " ".join(PRODUCT)
# The laboratory. It may import the product, and of the product only the command line may import it.
LABORATORY = rooms(f"""\
lab:
# what Megatron asks of a GPU, answered on the CPU
lab.cpu: integration | torch megatron | transformer_engine
lab.reference: patterns | torch
lab.train: command_errors config_files errors option_values settings shipped integration lab.cpu
    launch.schema launch.workload overlap.report symm.step_end versions.megatron_core
    | torch megatron matplotlib numpy pydantic typer
# decodes what `train` has trained, in ranks that `train` starts
lab.generate: command_errors errors launch.schema option_values overlap.report symm.step_end
    lab.train versions.megatron_core | torch megatron pydantic typer
# what runs have logged, and what they were to be: read and predicted where they are submitted
lab.results: errors launch option_values lab.perf | scipy typer | matplotlib rich
lab.perf: errors launch.memory launch.workload overlap.band_shares
    overlap.hopper_pushes patterns problem | pydantic
lab.simulate: config_files errors launch option_values lab.perf | typer | rich
# beside other libraries
lab.bench: {BELOW} lab.reference | *
lab.measure: {BELOW} lab.bench lab.cpu lab.results | *
""")
PRODUCT |= rooms(f"""\
: {BELOW}
doctor: {BELOW} | *
preflight: | torch  # runs on a node before the ranks, and once as ranks of its own
# reads Megatron's sources as text: it works where neither torch nor megatron can be imported
patching: errors shipped versions.megatron_core | typer
cli: {BELOW} doctor patching | *
__main__: command_errors lab_commands version cli doctor
""")
TABLE = PRODUCT | LABORATORY
BY_NAME = {"importlib.import_module", "import_module", "__import__"}
# These must start fast on any machine: outside functions they import no more than this.
AT_IMPORT = rooms(f"""\
: {BASE}
launch: config_files version errors machine option_values problem shipped versions.megatron_core
    integration.parser_signature | jinja2 pydantic typer yaml
doctor: {BASE} command_errors option_values versions
__main__: command_errors errors lab_commands version
lab_commands: command_errors errors
cli: {BASE} command_errors command_group doctor launch.commands option_values patching
    tune_command.commands versions | rich typer
""")


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
    nodes = [*ast.walk(ast.parse(file.read_text(), file.name))]
    inside = {id(node) for block in nodes if is_deferred(block) for node in ast.walk(block)}
    package_of_file = ".".join([PACKAGE, *file.relative_to(package).parent.parts])
    for node in nodes:
        for name in imported_names(node, package_of_file):
            yield node.lineno, name, id(node) in inside or names_laboratory(node)


def room_of(module: str) -> str:
    """The room of a module, less the first name: `lab.train` of `lab.train.loop`."""
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] == LAB else 1])


def is_deferred(node: ast.AST) -> bool:
    for_type_checkers = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    return for_type_checkers or isinstance(
        node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    )


def is_allowed(room: str, rules: Room, target: str, package: Path, lazy: bool) -> bool:
    top = target.split(".")[0]
    if top == PACKAGE:
        module = module_name(package, target)
        return room_of(module) == room or allows(rules.ours, module)
    known = top in sys.stdlib_module_names or allows(rules.packages, target)
    return known or (lazy and allows(rules.lazily, target))


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
            rules = TABLE[name] if lazy else AT_IMPORT.get(name, TABLE[name])
            if not is_allowed(name, rules, target, package, lazy):
                found.append(f"{path}:{line} {name or '__init__'} -> {target}")
    return found


def circle(package: Path) -> list[str]:
    """Modules of which each imports another one, the first and last the same; none is best."""
    graph = {}
    for file in package.rglob("*.py"):
        module = ".".join(file.relative_to(package).with_suffix("").parts)
        names = [name for _, name, _ in imports(file, package) if name.split(".")[0] == PACKAGE]
        graph[module.removesuffix(".__init__")] = {module_name(package, name) for name in names}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [*error.args[1]]
    return []


def test_no_module_imports_itself_by_another():
    assert circle(SOURCE) == []


def test_every_import_is_in_the_table_and_every_room_of_the_package_is_seen():
    assert not violations(SOURCE)
    files = [file.relative_to(SOURCE).with_suffix("") for file in SOURCE.rglob("*.py")]
    seen = {room_of(".".join(file.parts)) for file in files} - {"lab.__init__"}
    assert {"__init__", "kernels", "overlap", "symm", "lab.results"} <= seen
    assert seen - {"__init__", "__main__"} <= TABLE.keys()


def test_the_product_may_import_nothing_of_the_laboratory():
    """The table itself, for whoever adds a row: only the command line names the laboratory."""
    named = {room: {*map(room_of, rules.ours.split())} for room, rules in PRODUCT.items()}
    assert [room for room, ours in named.items() if ours & LABORATORY.keys()] == ["lab_commands"]


# each line: a file, and what it imports
BAD = """\
symm/buffer.py from ..overlap import fused
symm/buffer.py def f(): import flux_megatron.overlap.fused
symm/buffer.py if TYPE_CHECKING: from flux_megatron.nn import functions
nn/functions.py importlib.import_module('flux_megatron.integration')
kernels/portable/ag_gemm.py from flux_megatron.symm import buffer
nn/functions.py from flux_megatron import report
lab/train/loop.py import flux_megatron
lab/train/loop.py from flux_megatron.cli import main
nn/functions.py import megatron.core
lab/perf/cost.py import torch.distributed
launch/sbatch.py def f(): from torch import Tensor
launch/sbatch.py from flux_megatron.integration import bootstrap
kernels/portable/ag_gemm.py import numpy
cli.py import torch
overlap/fused.py def f(): from flux_megatron.lab import bench
cli.py def f(): import flux_megatron.lab.train.loop
lab_commands.py import flux_megatron.lab.train.loop
nn/functions.py importlib.import_module('flux_megatron.lab.train.loop')
nn/functions.py if TYPE_CHECKING: from flux_megatron.lab.train import loop
launch/sbatch.py f = lambda room: [f'flux_megatron.lab.{room}.worker']
__init__.py from flux_megatron.nn import functions
helpers.py import os
"""
GOOD = """\
kernels/portable/ag_gemm.py from flux_megatron.symm import signals
symm/buffer.py from . import signals
overlap/fused.py from flux_megatron.symm.buffer import SymmetricBuffer
nn/functions.py from flux_megatron.ops import all_gather_gemm
cli.py def f(): import torch
lab_commands.py F = 'flux_megatron.lab.train'
lab/train/loop.py import flux_megatron.lab.train
__init__.py if TYPE_CHECKING: from flux_megatron.nn import functions
__init__.py def f(): import flux_megatron.nn
"""


@pytest.fixture
def tree(tmp_path):
    """A package with every room of the table and nothing in them."""
    package = tmp_path / PACKAGE
    for name in ("kernels/portable/ag_gemm", "symm/buffer", "symm/signals", "overlap/fused",
                 "nn/functions", "integration/layers", "lab/train/loop", "lab/bench/suite",
                 "lab/perf/cost", "launch/sbatch", "ops", "cli", "__init__"):  # fmt: skip
        file = package / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return package


@pytest.mark.parametrize("line", (BAD + GOOD).splitlines())
def test_a_bad_import_is_caught_and_a_good_one_is_allowed(tree, line):
    path, source = line.split(maxsplit=1)
    (tree / path).write_text(source)
    found = violations(tree)
    assert len(found) == (line in BAD.splitlines())
    assert all(one.startswith(path) for one in found)


def test_a_circle_is_found(tree):
    (tree / "symm/buffer.py").write_text("from . import signals")
    assert circle(tree) == []
    (tree / "symm/signals.py").write_text("def f(): from flux_megatron.symm.buffer import Buffer")
    assert {*circle(tree)} == {"symm.buffer", "symm.signals"}


def loaded_after(code: str) -> set[str]:
    """Top-level modules of a fresh interpreter after it ran `code`."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = python("-c", script, folder=SOURCE.parent)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_package_loads_nothing_heavy():
    rooms = ("settings", "errors", "problem", "launch", "nn", "integration")
    modules = ", ".join(f"{PACKAGE}.{name}" for name in rooms)
    loaded = loaded_after(f"import {PACKAGE}, {modules}; dir({PACKAGE}.integration)")
    assert not loaded & {"torch", "triton", "numpy", "megatron", "yaml", "pydantic", "rich"}
    assert "numpy" in loaded_after(f"import {PACKAGE}, numpy"), "it would be noticed"


def test_importing_the_layers_below_megatron_touches_no_device_and_no_group():
    """Nor does it ask whether CUDA is there, which begins the driver: its GPUs are those of that
    moment, and Ray says a worker's own later.
    """
    context, group = (f"torch.{module}.is_initialized()" for module in ("cuda", "distributed"))
    asked = "torch.cuda.is_available = torch.cuda.get_device_capability = lambda: 1 / 0"
    check = f"assert not {context}, 'a context'\nassert not {group}, 'a group'"
    code = f"import torch\n{asked}\nimport {PACKAGE}.nn.linear, {PACKAGE}.ops\n{check}"
    assert "megatron" not in loaded_after(code)
