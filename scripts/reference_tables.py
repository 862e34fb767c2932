"""Tables of docs/ that the sources have: `python scripts/reference_tables.py` renews them.

docs/troubleshooting.md: the texts of every `raise` in what users run, and the reasons why a call is
refused or runs without overlap, which functions return as `str | None`; `...` where something is
put in. Errors that quote another text, that their callers catch, or that no user can cause are left
out. docs/reference/environment.md: the variables in the docstring of `settings.py`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
ERRORS = ROOT / "docs" / "troubleshooting.md"
VARIABLES = ROOT / "docs" / "reference" / "environment.md"
ROOMS = (
    "config_files.py", "dispatch.py", "generate", "integration", "kernels", "launch", "nn",
    "ops.py", "overlap", "settings.py", "symm", "train", "tuning",
)  # fmt: skip
OUR_OWN = {
    "AttributeError", "ArgumentTypeError", "ConstructorError", "NoRoom", "NotImplementedError",
    "Unrecordable",
}  # fmt: skip


class Raised(NamedTuple):
    text: str
    error: str
    file: str


def raised() -> list[Raised]:
    """Each text once, file by file."""
    found: dict[str, Raised] = {}
    for file in _files():
        for node in ast.walk(ast.parse(file.read_text())):
            for one in _raised_by(node, file.relative_to(ROOT / "flux_megatron").as_posix()):
                found.setdefault(one.text, one)
    return list(found.values())


def errors() -> str:
    rows = (
        f"| `{one.text.splitlines()[0].replace('|', chr(92) + '|')}` | {one.error} | {one.file} |"
        for one in raised()
    )
    return "\n".join(
        ("| text | error | raised in `flux_megatron/` |", "| --- | --- | --- |", *rows)
    )


def filled_in(text: ast.expr) -> str:
    """A string expression, `...` for what an f-string puts in."""
    if isinstance(text, ast.Constant):
        return str(text.value)
    assert isinstance(text, ast.JoinedStr)
    parts = (str(p.value) if isinstance(p, ast.Constant) else "..." for p in text.values)
    return re.sub(r"\.{4,}", "...", "".join(parts))


def _files() -> Iterator[Path]:
    for room in ROOMS:
        yield from sorted((ROOT / "flux_megatron").rglob(room if "." in room else f"{room}/*.py"))


def _raised_by(node: ast.AST, file: str) -> Iterator[Raised]:
    if isinstance(node, ast.FunctionDef) and node.returns is not None:
        if ast.unparse(node.returns) == "str | None":
            yield from (Raised(text, "a reason", file) for text in _reasons(node))
    elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
        error, text = ast.unparse(node.exc.func).rpartition(".")[2], node.exc.args[0]
        if error not in OUR_OWN and _says_something(text):
            yield Raised(filled_in(text), error, file)


def _reasons(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and node.value is not None:
            value = node.value
            either = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
            yield from (filled_in(text) for text in either if _says_something(text))


def _says_something(text: ast.expr) -> bool:
    if not (isinstance(text, ast.JoinedStr) or isinstance(getattr(text, "value", None), str)):
        return False
    return bool(re.search("[a-z]{3}.* ", re.sub("given|expected|failed", "", filled_in(text))))


def variables() -> str:
    docstring = ast.get_docstring(ast.parse((ROOT / "flux_megatron/settings.py").read_text())) or ""
    rows = [line for line in docstring.splitlines() if line.startswith("|")]
    return re.sub(r"^\| (FLUX\w+)", r"| `\1`", "\n".join(rows), flags=re.MULTILINE)


def block(name: str, table: str) -> str:
    return f"<!-- {name} -->\n{table}\n<!-- end of {name} -->"


def renew(page: Path, name: str, table: str) -> None:
    old = re.compile(rf"<!-- {name} -->.*<!-- end of {name} -->", re.DOTALL)
    page.write_text(old.sub(lambda _: block(name, table), page.read_text()))


if __name__ == "__main__":
    renew(ERRORS, "errors", errors())
    renew(VARIABLES, "variables", variables())
