"""docs/troubleshooting.md quotes only texts that the package can print, and all of its errors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
# how the page says that a code span is no quotation: a name, an option, a command, a file
NAME = re.compile(r"[\w./-]+(=\w+)?|--[\w-]+( [A-Za-z]+)?|flux-megatron \w+|print\(.*\)|file: .*")
NOT_OURS = {"CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED"}
ROOMS = (
    "config_files.py", "ops.py", "dispatch.py", "nn", "symm", "overlap", "tuning", "integration",
    "launch", "train", "settings.py",
)  # fmt: skip
# errors that their callers catch, or that no user can cause
OUR_OWN = [
    "AttributeError",
    "ArgumentTypeError",
    "ConstructorError",
    "NoRoom",
    "NotImplementedError",
]


def quotations() -> list[str]:
    spans = re.findall(r"`([^`]+)`", PAGE.read_text().split("## ", 1)[1])
    return sorted({span for span in spans if not NAME.fullmatch(span)} - NOT_OURS)


@cache
def texts() -> tuple[str, ...]:
    """The texts in the package's sources and templates, `...` where something is put in."""
    found = [_filled_in(text) for file in _sources("*.py") for text in _constants(file)]
    return (*found, *(file.read_text() for file in _sources("*.j2")))


def _sources(pattern: str) -> Iterator[Path]:
    yield from (ROOT / "flux_megatron").rglob(pattern)


def _constants(file: Path) -> Iterator[ast.expr]:
    """String expressions; of an f-string also its pieces, which may be texts of their own."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.JoinedStr) or (
            isinstance(node, ast.Constant) and isinstance(node.value, str)
        ):
            yield node


def _filled_in(text: ast.expr) -> str:
    if isinstance(text, ast.Constant):
        return str(text.value)
    assert isinstance(text, ast.JoinedStr)
    parts = (str(p.value) if isinstance(p, ast.Constant) else "..." for p in text.values)
    return "".join(parts)


def _pattern(quotation: str) -> re.Pattern[str]:
    parts = (re.escape(part.strip()) for part in quotation.split("...") if part.strip())
    return re.compile(".*".join(parts))  # within one line


def can_be_printed(quotation: str) -> bool:
    return any(_pattern(quotation).search(text) for text in texts())


def raised() -> dict[str, str]:
    """Texts of errors in what users run, each with its place; those that quote others left out."""
    found = {}
    for room in ROOMS:
        for file in _sources(f"{room}/*.py" if "." not in room else room):
            for node in ast.walk(ast.parse(file.read_text())):
                if text := _text_of_error(node):
                    found[text] = f"{file.relative_to(ROOT)}:{node.lineno}"
    return {text: place for text, place in found.items() if re.search("[a-z]{3}", _plain(text))}


def _plain(text: str) -> str:
    return re.sub("given|expected|failed", "", text)


def _text_of_error(node: ast.AST) -> str:
    if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args):
        return ""
    kind, text = ast.unparse(node.exc.func).rpartition(".")[2], node.exc.args[0]
    is_text = isinstance(text, ast.JoinedStr | ast.Constant)
    return _filled_in(text) if is_text and kind not in OUR_OWN else ""


@pytest.mark.parametrize("quotation", quotations())
def test_the_text_stands_in_the_code(quotation):
    assert can_be_printed(quotation), f"{PAGE.name} quotes a text that no source has"


def test_every_error_has_its_line():
    known = [_pattern(quotation) for quotation in quotations()]
    missing = {t: place for t, place in raised().items() if not any(k.search(t) for k in known)}
    assert not missing, f"{PAGE.name} quotes none of these"


def test_a_text_of_nobody_is_noticed():
    assert len(quotations()) > 50 < len(raised())
    assert not can_be_printed("the group spans ... continents")
    assert not can_be_printed("bytes of symmetric memory, ... a captured call needs")
