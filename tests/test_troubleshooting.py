"""docs/troubleshooting.md quotes only texts that the package can print."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
tables = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts/reference_tables.py")))
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
# how the page says that a code span is no quotation: a name, an option, a command, a file
NAME = re.compile(
    r"[\w./-]+(=\w+)?|--[\w-]+( [A-Za-z]+)?|file: .*"
    r"|flux-megatron [\w -]+( \.\.\.)?|print\(.*\)|[\w.]+\(\)|python -m .*"
)
NOT_OURS = {"CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED"}


def quotations() -> list[str]:
    spans = re.findall(r"`([^`]+)`", PAGE.split("## ", 1)[1])
    return sorted({span for span in spans if not NAME.fullmatch(span)} - NOT_OURS)


@cache
def texts() -> tuple[str, ...]:
    """The texts in the package's sources and templates, `...` where something is put in."""
    found = [filled_in(text) for file in _sources("*.py") for text in _constants(file)]
    return (*found, *(file.read_text() for file in _sources("*.j2")))


def filled_in(text: ast.expr) -> str:
    """A string expression, `...` for what an f-string puts in."""
    if isinstance(text, ast.Constant):
        return str(text.value)
    assert isinstance(text, ast.JoinedStr)
    parts = (str(p.value) if isinstance(p, ast.Constant) else "..." for p in text.values)
    return re.sub(r"\.{4,}", "...", "".join(parts))


def _sources(pattern: str) -> Iterator[Path]:
    yield from (ROOT / "flux_megatron").rglob(pattern)


def _constants(file: Path) -> Iterator[ast.expr]:
    """String expressions; of an f-string also its pieces, which may be texts of their own."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.JoinedStr) or (
            isinstance(node, ast.Constant) and isinstance(node.value, str)
        ):
            yield node


def _pattern(quotation: str) -> re.Pattern[str]:
    parts = (re.escape(part.strip()) for part in quotation.split("...") if part.strip())
    return re.compile(".*".join(parts))  # within one line


def can_be_printed(quotation: str) -> bool:
    return any(_pattern(quotation).search(text) for text in texts())


@pytest.mark.parametrize("quotation", quotations())
def test_the_text_stands_in_the_code(quotation):
    assert can_be_printed(quotation), "docs/troubleshooting.md quotes a text that no source has"


def test_the_variables_are_those_of_the_settings():
    assert tables.block("variables", tables.variables()) in tables.VARIABLES.read_text(), (
        "docs/reference/environment.md is old: python scripts/reference_tables.py"
    )


def test_a_text_of_nobody_is_noticed():
    assert len(quotations()) > 50
    assert not can_be_printed("the group spans ... continents")
    assert not can_be_printed("bytes of symmetric memory, ... a captured call needs")
