"""`python scripts/record_release.py path/to/Megatron-LM core_v0.20.0`: a release that is new to us.

| file | what it gets |
| --- | --- |
| `patches/NAME/fingerprints.json` | hashes of the functions that we replace or rely on |
| `patches/NAME/seams.json` | the names by which options reach our layers, by seam |
| `flux_megatron/integration/signatures.tsv` | what the parser accepts |

The first two are read from the sources, which must be unpatched. For the last this Python must be
able to import the checkout's `megatron.training`.

| seam | names |
| --- | --- |
| config | fields of ModelParallelConfig, TransformerConfig and MLATransformerConfig |
| provider | methods of layer specifications' providers, and their arguments as method.argument |
| linear | arguments that the constructors of the linear layers take by name |
| forward | arguments of those layers' forward, and what that passes to `_forward_impl` |

`integration.seams` has a decision on each name.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flux_megatron.integration.parser_signature import ALL, FILE, TYPES, Signature, recorded
from flux_megatron.patching import series
from flux_megatron.patching.checkout import Refused, version_of
from flux_megatron.patching.fingerprints import RELIED_ON, digest, functions

SEAMS = "seams.json"
_TE = "megatron/core/extensions/transformer_engine.py"
_LAYERS = "megatron/core/tensor_parallel/layers.py"
_LINEAR = {
    _LAYERS: ("ColumnParallelLinear", "RowParallelLinear"),
    _TE: ("TEColumnParallelLinear", "TELayerNormColumnParallelLinear", "TERowParallelLinear"),
}
_CONFIG = {
    "megatron/core/model_parallel_config.py": ("ModelParallelConfig",),
    "megatron/core/transformer/transformer_config.py": (
        "TransformerConfig",
        "MLATransformerConfig",
    ),
}
_PROVIDER = {
    "megatron/core/models/backends.py": ("BackendSpecProvider", "LocalSpecProvider"),
    "megatron/core/extensions/transformer_engine_spec_provider.py": ("TESpecProvider",),
}

# Runs beside the checkout.
DUMP = """
import argparse, json, sys
sys.path[:0] = [{checkout!r}, {scripts!r}]
from flux_megatron.lab.cpu import provide_override
provide_override()
from megatron.training.arguments import add_megatron_arguments
from record_release import signature_of
parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
print()  # imports may have left a line unfinished
print(json.dumps(signature_of(parser)))
"""


def record_parser(checkout: Path, release: str) -> None:
    """`RuntimeError` with the end of the parser's output if it cannot be imported."""
    code = DUMP.format(checkout=str(checkout.resolve()), scripts=str(Path(__file__).parent))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        raise RuntimeError(f"{checkout} has no parser that could be run:\n{done.stderr[-2000:]}")
    FILE.write_text(table(recorded() | {release: json.loads(done.stdout.splitlines()[-1])}))


def signature_of(parser: argparse.ArgumentParser) -> Signature:
    """An option is `flag`, `int`, `float` or `str` where that is all; else its type, its choices
    and how many values it takes.
    """
    return {
        string: _described(action)
        for action in parser._actions
        for string in action.option_strings
        if string.startswith("--")
    }


def _described(action: argparse.Action) -> str | dict[str, Any]:
    if action.nargs == 0:
        return "flag"
    name = getattr(action.type, "__name__", "str")
    described: dict[str, Any] = {"type": name if name in TYPES else "str"}
    if action.choices is not None:
        described["choices"] = [getattr(choice, "name", choice) for choice in action.choices]
    if action.nargs is not None:
        described["nargs"] = action.nargs
    return described if len(described) > 1 else str(described["type"])


def table(signatures: dict[str, Signature]) -> str:
    """`signatures.tsv`, sorted: after its head, which names the releases, an option, its type in
    JSON and who has it.
    """
    names = sorted(signatures)
    having: dict[tuple[str, str], list[str]] = {}
    for name in names:
        for option, described in signatures[name].items():
            having.setdefault((option, json.dumps(described)), []).append(name)
    lines = [f"option\ttype\t{' '.join(names)}"]
    for (option, described), who in sorted(having.items()):
        lines.append(f"{option}\t{described}\t{ALL if who == names else ' '.join(who)}")
    return "\n".join(lines) + "\n"


def record_functions(checkout: Path, name: str) -> None:
    """`Refused` where the patch is in, or has no function to go into."""
    version, folder = version_of(checkout), series.FOLDER / name
    wanted = {path: set(names) for path, names in RELIED_ON.items()}
    for hunk in series.hunks():
        source = _read(checkout, hunk.path)
        if hunk.text in source:
            raise Refused(f"{checkout}: {hunk.path} is patched already, undo that first")
        if hunk.function not in functions(source):
            raise Refused(f"{checkout}: {hunk.path} has no function {hunk.function}")
        wanted.setdefault(hunk.path, set()).add(hunk.function)
    hashes = {}
    for path in sorted(wanted):
        found = functions(_read(checkout, path))
        hashes[path] = {one: found[one].sha256 for one in sorted(wanted[path] & found.keys())}
    files = {path: digest(text) for path in RELIED_ON if (text := _read(checkout, path))}
    content = {"version": version, "hashes": hashes, "files": files}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / series.FINGERPRINTS).write_text(json.dumps(content, indent=1) + "\n")
    lines = (f"{json.dumps(seam)}: {json.dumps(found)}" for seam, found in names(checkout).items())
    (folder / SEAMS).write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _read(checkout: Path, path: str) -> str:
    file = checkout / path
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def names(checkout: Path) -> dict[str, list[str]]:
    """By seam, sorted. A release need not have every class."""
    return {
        "config": sorted({n for c in _classes(checkout, _CONFIG) for n in _fields(c)}),
        "provider": sorted({n for c in _classes(checkout, _PROVIDER) for n in _methods(c)}),
        "linear": sorted({n for c in _classes(checkout, _LINEAR) for n in _constructor(c)}),
        "forward": sorted(
            {n for c in _classes(checkout, {_LAYERS: _LINEAR[_LAYERS]}) for n in _forward(c)}
        ),
    }


def _classes(checkout: Path, wanted: dict[str, tuple[str, ...]]) -> Iterator[ast.ClassDef]:
    for path, classes in wanted.items():
        file = checkout / path
        if file.is_file():
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and node.name in classes:
                    yield node


def _fields(node: ast.ClassDef) -> Iterator[str]:
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            yield line.target.id


def _functions(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {line.name: line for line in node.body if isinstance(line, ast.FunctionDef)}


def _methods(node: ast.ClassDef) -> Iterator[str]:
    for name, function in _functions(node).items():
        yield from [name] if not name.startswith("_") else []
        yield from (f"{name}.{argument}" for argument in _arguments(function))


def _constructor(node: ast.ClassDef) -> Iterator[str]:
    function = _functions(node).get("__init__")
    return _arguments(function) if function else iter(())


def _forward(node: ast.ClassDef) -> Iterator[str]:
    """Of megatron-core's layers: TransformerEngine's are replaced as a whole."""
    forward = _functions(node).get("forward")
    if forward is None:
        return
    yield from _arguments(forward)
    for call in ast.walk(forward):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "self._forward_impl":
            yield from (keyword.arg for keyword in call.keywords if keyword.arg)


def _arguments(function: ast.FunctionDef) -> Iterator[str]:
    of = function.args
    return (a.arg for a in (*of.posonlyargs, *of.args, *of.kwonlyargs) if a.arg != "self")


if __name__ == "__main__":
    record_functions(Path(sys.argv[1]), sys.argv[2])
    record_parser(Path(sys.argv[1]), sys.argv[2])
