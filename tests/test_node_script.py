"""scripts/node.sh: every command that it would run on a node of GPUs is one that there is."""

from __future__ import annotations

import argparse
import inspect
import os
import re
import runpy
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("pydantic")

import typer

from flux_megatron.cli import app
from flux_megatron.doctor import parser

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts/node.sh"
RUNS = ("shared", "iterations", "launches", "megatron", "operators", "operations", "checks")


def commands(run: str, folder: Path) -> list[list[str]]:
    environment = {"PRINT": "1", "GPUS": "4", "FLUX_MEGATRON_LM": "lm", "PYTHON": sys.executable}
    printed = subprocess.run(
        [SCRIPT, run, folder], env={**os.environ, **environment}, text=True, check=True,
        capture_output=True,
    ).stdout  # fmt: skip
    return [shlex.split(line)[1:] for line in printed.splitlines()]


def known(words: list[str]) -> set[str]:
    """The options of the program that `words` begin with."""
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
    return {option for parameter in command.params for option in parameter.opts}


def options_in(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}


def options_of(names: dict[str, Any]) -> set[str]:
    """Of a script, by what it defines."""
    if "argparse" in names:
        return options_in(names["parser"]())
    main, found = names["main"], set()
    for name, parameter in inspect.signature(main, eval_str=True).parameters.items():
        named = [
            one for one in getattr(parameter.annotation, "__metadata__", ()) if one.param_decls
        ]
        found |= {*(named[0].param_decls if named else ("--" + name.replace("_", "-"),))}
    return found


def program(words: list[str]) -> list[str]:
    """Without the launcher: from the script or the package on."""
    return words[next(i for i, w in enumerate(words) if re.match(r"flux_megatron|.*\.py$", w)) :]


@pytest.mark.parametrize("run", RUNS)
def test_every_command_knows_its_options(run, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests/gpu")
    asked = 0
    for words in commands(run, tmp_path):
        if words[-1] == "scripts/test.sh":
            continue
        words = program(words)
        given = {word for word in words if word.startswith("--")}
        assert given <= known(words), words
        asked += 1
    assert asked


def test_an_unknown_run_is_refused(tmp_path):
    ended = subprocess.run([SCRIPT, "all", tmp_path], env={**os.environ, "GPUS": "4"},
                           capture_output=True, text=True)  # fmt: skip
    assert ended.returncode == 2
    assert "RUN all given; shared, iterations, launches," in ended.stderr
