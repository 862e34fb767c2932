"""docs/map.md names files, functions and rooms that exist, and leaves no room out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "flux_megatron"
PATH, ROOMS = (PACKAGE.parent / "docs/map.md").read_text(encoding="utf-8").split("## The rooms")
FILE = re.compile(r"`([\w/]+\.(?:py|c))`")
NAME = re.compile(r"`(\w+(?:\.\w+)?)`")
STRATEGIES = {"hopper", "sequential", "signalled"}
NO_ROOMS = {"__init__.py", "__main__.py", "__pycache__", "lab", "py.typed", "version.py"}


def defined(file: Path) -> set[str]:
    """The functions and classes of a file; methods as Class.method."""
    if file.suffix == ".c":
        return set(re.findall(r"^static \w+ \*?(\w+)\(", file.read_text(), re.M))
    found = set()
    for one in ast.parse(file.read_text()).body:
        if isinstance(one, ast.ClassDef | ast.FunctionDef):
            found.add(one.name)
        if isinstance(one, ast.ClassDef):
            found |= {f"{one.name}.{m.name}" for m in one.body if isinstance(m, ast.FunctionDef)}
    return found


def test_the_path_has_ten_lines_that_begin_with_a_file_and_its_function():
    numbers = re.findall(r"^(\d+)\. `[\w/]+\.(?:py|c)`, `[\w.]+`", PATH, re.M)
    assert numbers == [str(number) for number in range(1, 11)]


def test_every_function_is_in_a_file_that_its_line_names():
    for line in PATH.splitlines():
        files = [PACKAGE / name for name in FILE.findall(line)]
        assert [file for file in files if not file.exists()] == []
        there = {name for file in files for name in defined(file)}
        assert not files or {*NAME.findall(FILE.sub("", line))} <= there | STRATEGIES, line


def test_every_room_has_a_line():
    cells = "".join(re.findall(r"^\| (`.*?) \|", ROOMS, re.M))
    product = {entry.name for entry in PACKAGE.iterdir()} - NO_ROOMS
    lab = {f"lab/{one.parent.name}" for one in PACKAGE.glob("lab/*/__init__.py")}
    assert {room.rstrip("/") for room in re.findall(r"`([\w./]+)`", cells)} == product | lab
