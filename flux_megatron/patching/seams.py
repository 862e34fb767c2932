"""The names by which options of a Megatron-LM release reach our layers, read from its sources.

| seam | names |
| --- | --- |
| config | fields of ModelParallelConfig, TransformerConfig and MLATransformerConfig |
| provider | methods of layer specifications' providers, and their arguments as method.argument |
| linear | arguments that the constructors of the linear layers take by name |
| forward | arguments of those layers' forward, and what that passes to `_forward_impl` |

Arguments of command lines are `launch.parser_signature`'s. `integration.seams` has a decision on
each name.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

FILE = "seams.json"
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


def write(checkout: Path, folder: Path) -> Path:
    """Record a checkout in its folder of patches; returns the file."""
    file = folder / FILE
    lines = (f"{json.dumps(seam)}: {json.dumps(found)}" for seam, found in names(checkout).items())
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return file


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
