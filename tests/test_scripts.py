"""Every command of scripts/node.sh is one that there is; scripts/pretrain.sh fails where it
compares less than it says; files that sources name are there, and so is what docs/map.md names.
"""

import argparse
import ast
import re
import runpy
import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from started import executable, ran

pytest.importorskip("pydantic")

import typer

from flux_megatron.cli import app
from flux_megatron.doctor import parser

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts/node.sh"
RUNS = ("shared", "iterations", "launches", "megatron", "operators", "operations", "checks")


def commands(run: str, folder: Path) -> list[list[str]]:
    environment = {"PRINT": "1", "GPUS": "4", "FLUX_MEGATRON_LM": "lm", "PYTHON": sys.executable}
    printed = ran(SCRIPT, run, folder, **environment).stdout
    return [shlex.split(line)[1:] for line in printed.splitlines()]


def known(words: list[str]) -> set[str]:
    if words[0].endswith(".py"):
        return options_of(runpy.run_path(str(ROOT / words[0]), run_name="not main"))
    if words[0].startswith("flux_megatron.lab.measure."):
        return options_of(vars(import_module(words[0])))
    assert words[0] == "flux_megatron", words
    if words[1] == "doctor":
        return options_in(parser())
    command = typer.main.get_command(app)
    for word in words[1:]:
        if word not in getattr(command, "commands", {}):
            break
        command = command.get_command(typer.Context(command), word)
    return options_of_command(command)


def options_in(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}


def options_of(names: dict[str, Any]) -> set[str]:
    """Of a script, by what it defines."""
    if "argparse" in names:
        return options_in(names["parser"]())
    script = typer.Typer()
    script.command()(names["main"])
    return options_of_command(typer.main.get_command(script))


def options_of_command(command: Any) -> set[str]:
    return {option for parameter in command.params for option in parameter.opts}


def program(words: list[str]) -> list[str]:
    """Without the launcher: from the script or the package on."""
    return words[next(i for i, w in enumerate(words) if re.match(r"flux_megatron|.*\.py$", w)) :]


@pytest.mark.parametrize("run", RUNS)
def test_every_command_knows_its_options(run, tmp_path, monkeypatch):
    for folder in ("gpu", "differential"):  # a script finds what lies beside it
        monkeypatch.syspath_prepend(ROOT / "tests" / folder)
    asked = [words for words in commands(run, tmp_path) if words[-1] != "scripts/test.sh"]
    assert asked
    for words in map(program, asked):
        assert {word for word in words if word.startswith("--")} <= known(words), words


def test_an_unknown_run_is_refused(tmp_path):
    said = ran(SCRIPT, "all", tmp_path, code=2, GPUS="4").stderr
    assert "RUN all given; shared, iterations, launches," in said


CALLS = "flux_megatron: 4 of 4 calls overlapped"
# what the ranks print: STOCK and OURS are losses of iterations
PRETENDED = """#!/usr/bin/env bash
case "$*" in
"-c "*) echo .so; exit ;;
*" --flux-overlap"*) losses=$OURS; echo "$SAID" ;;
*) losses=$STOCK ;;
esac
for loss in $losses; do
    echo " [now] iteration $((++i))/ 3 | lm loss: $loss | grad norm: 1 |"
done
"""


@pytest.mark.parametrize(
    ("ours", "options", "code", "word"),
    [
        ("4.0 3.0 2.0", {}, 0, "4 of 4 calls"),
        ("4.0 3.0 2.0", {"PYTHON": "./python"}, 0, "4 of 4 calls"),
        *((losses, {}, 1, "DIFFERENT") for losses in ("4.0 3.0 2.1", "4.0 3.0", "", "4.0 3.0 nan")),
        ("4.0 3.0 2.0", {"SAID": ""}, 1, "NOTHING OVERLAPPED"),
        ("4.0 3.0 2.0", {"MODELS": "gpt lama"}, 2, "MODELS has lama"),
    ],
)
def test_it_passes_only_with_all_losses_and_calls(ours, options, code, word, tmp_path):
    python = executable(tmp_path / "python", PRETENDED)
    (tmp_path / "lm").mkdir()
    given = {"PYTHON": str(python), "FLUX_MEGATRON_LM": str(tmp_path / "lm"), "MODELS": "gpt",
             "RANKS": "2", "STOCK": "4.0 3.0 2.0", "OURS": ours, "SAID": CALLS}  # fmt: skip
    run = ran("bash", ROOT / "scripts/pretrain.sh", code=code, folder=tmp_path, **given | options)
    assert word in run.stdout + run.stderr


@pytest.mark.parametrize(
    ("words", "out"),
    [((), r"out/demo-[\d-]+"), (("--set", "x= --out y"), r"out/demo-[\d-]+"),
     (("--tp", "2", "--out", "a b"), "a b"), (("--out", "a", "--tp=2", "--out=c d"), "c d")],
)  # fmt: skip
def test_the_demonstration_decodes_with_what_it_has_trained(words, out, tmp_path):
    there = {"scripts/demo.sh": (ROOT / "scripts/demo.sh").read_text()}
    there["scripts/environment.sh"] = "#!/bin/sh\n"
    there[".venv/bin/flux-megatron"] = '#!/bin/sh\nfor word; do echo "$word"; done\n'
    for name, text in there.items():
        executable(tmp_path / name, text)
    said = ran("bash", tmp_path / "scripts/demo.sh", *words).stdout
    assert re.search(rf"^generate\n--checkpoint\n{out}/flux\n", said, re.M), said


NAMED = re.compile(r"docs/[\w/.-]*\w\.(?:md|svg|jsonl?|png)\b")
DECISION = re.compile(r"[Dd]ecisions? (\d+)\b")
SOURCES = [file for folder in ("flux_megatron", "scripts", "tests")
           for pattern in ("*.py", "*.sh", "*.c", "*.yaml", "*.tsv")
           for file in (ROOT / folder).rglob(pattern)]  # fmt: skip


def gone(text: str) -> list[str]:
    decisions = (ROOT / "docs/decisions/index.md").read_text()
    records = set(re.findall(r"^## (\d{4}):", decisions, re.M))
    lost = [name for name in NAMED.findall(text) if not (ROOT / name).exists()]
    return lost + [f"decision {n}" for n in DECISION.findall(text) if n not in records]


def test_every_named_file_is_there():
    found = {file: gone(file.read_text()) for file in SOURCES if file != Path(__file__)}
    assert {file: names for file, names in found.items() if names} == {}


PACKAGE = ROOT / "flux_megatron"
PATH, ROOMS = (ROOT / "docs/map.md").read_text(encoding="utf-8").split("## The rooms")
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


def test_every_function_of_the_two_paths_is_in_a_file_that_its_line_names():
    numbers = re.findall(r"^(\d+)\. `[\w/]+\.(?:py|c)`, `[\w.]+`", PATH, re.M)
    assert numbers == [str(number) for number in (*range(1, 4), *range(1, 11))]
    for line in PATH.splitlines():
        files = FILE.findall(line)
        there = {name for file in files for name in defined(PACKAGE / file)}
        assert not files or {*NAME.findall(FILE.sub("", line))} <= there | STRATEGIES, line


def test_every_room_has_a_line():
    cells = "".join(re.findall(r"^\| (`.*?) \|", ROOMS, re.M))
    product = {entry.name for entry in PACKAGE.iterdir()} - NO_ROOMS
    lab = {f"lab/{one.parent.name}" for one in PACKAGE.glob("lab/*/__init__.py")}
    assert {room.rstrip("/") for room in re.findall(r"`([\w./]+)`", cells)} == product | lab
