"""What a measured time depends on besides its problem: the machine, the software, our sources."""

from __future__ import annotations

import ast
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

PACKAGE = Path(__file__).parents[1]
# The rooms whose files run in a call, and what in them does not: the table, the counts and the
# interpreter, which GPUs do without.
OVERLAP = "overlap"  # the room of the strategies, but of those of experts
ROOMS = ("kernels", OVERLAP, "symm")
NOT_RUN = {
    "interpreter", "interpreter_operators", "interpreter_types", "norm", "registry", "report",
}  # fmt: skip


@dataclass(frozen=True)
class Environment:
    """All of it is part of a measurement's key: where one field differs it is another one.

    `link` joins the GPUs of the node; `max_connections` is CUDA_DEVICE_MAX_CONNECTIONS or "unset";
    `sources` is a digest of the code that runs in a call: in an entry, by the plan's strategy.
    """

    gpu: str
    link: str
    driver: str
    cuda: str
    torch: str
    triton: str
    max_connections: str
    sources: str


@cache
def of(device: torch.device, strategy: str | None = None, room: str = OVERLAP) -> Environment:
    """The environment of this process and `device`; `sources` are those of one strategy of a room,
    or of all if none is named.
    """
    import triton

    from flux_megatron.tuning import link

    on_gpu = device.type == "cuda"
    return Environment(
        gpu=torch.cuda.get_device_name(device) if on_gpu else device.type,
        link=link.of(device) if on_gpu else "host memory",
        driver=driver_version() if on_gpu else "none",
        cuda=torch.version.cuda or "none",
        torch=torch.__version__,
        triton=triton.__version__,
        max_connections=os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") or "unset",
        sources=sources_digest(PACKAGE, strategy, room),
    )


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The kernel driver's version, such as 580.65.06."""
    try:
        found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", file.read_text())
    except OSError:
        return "unknown"
    return found.group() if found else "unknown"


def sources_digest(package: Path, strategy: str | None = None, room: str = OVERLAP) -> str:
    """A digest of the code that calls of a strategy run, or of all strategies; comments, docstrings
    and layout aside. Every Python from 3.10 on gives the same.
    """
    codes = {file: _code(file.read_text()) for file in _files(package, room)}
    own = package / room / f"{strategy}.py"
    files = sorted(codes if strategy is None else _imported(package, codes, own))
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(package)} {codes[file].text}\n".encode())
        if (beside := file.with_suffix(".c")).exists():  # what the file compiles
            digest.update(beside.read_bytes())
    return digest.hexdigest()[:16]


def _files(package: Path, room: str) -> list[Path]:
    rooms = dict.fromkeys([*ROOMS, room])
    found = (file for one in rooms for file in (package / one).glob("*.py"))
    return [file for file in found if file.stem not in NOT_RUN]


class _Code(NamedTuple):
    """A file without comments, docstrings and layout, and the names of modules that it imports."""

    text: str
    imported: frozenset[str]


@cache  # every strategy asks for nearly all files, and parsing them takes a second
def _code(source: str) -> _Code:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and _is_docstring(body[0]):
            del body[0]
    names = frozenset(name for node in ast.walk(tree) for name in _modules(node))
    return _Code(_text(tree), names)


def _is_docstring(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _text(node: object) -> str:
    """The tree as text, without what only some versions of Python write: empty fields. Neither
    `ast.dump` nor `ast.unparse` gives the same text in all of them.
    """
    if isinstance(node, ast.AST):
        fields = (f"{k}={_text(v)}" for k, v in ast.iter_fields(node) if v is not None and v != [])
        return f"{type(node).__name__}({', '.join(fields)})"
    if isinstance(node, list):
        return f"[{', '.join(map(_text, node))}]"
    return ascii(node)


def _imported(package: Path, codes: Mapping[Path, _Code], own: Path) -> set[Path]:
    """The files among `codes` that a strategy's own file imports, directly or not, and itself."""
    found: set[Path] = set()
    left = {own} & codes.keys()
    while left:
        file = left.pop()
        found.add(file)
        paths = (package.joinpath(*name.split(".")[1:]) for name in codes[file].imported)
        files = {one for path in paths for one in (path.with_suffix(".py"), path / "__init__.py")}
        left |= (files & codes.keys()) - found
    return found


def _modules(node: ast.AST) -> Iterator[str]:
    """The names that an import may mean, with the packages around them."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    for name in names:
        parts = name.split(".")
        yield from (".".join(parts[:end]) for end in range(2, len(parts) + 1))
