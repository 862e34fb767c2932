"""Broken copies of single modules, each of which one named test must notice.

`source_mutants.diff` lists them as `mutants.diff` does, with a test instead of a case. They are for
what virtual ranks do not run: choosing, measuring, autograd, Megatron's layers, files. The test
runs in a forked process in which the module has been replaced wherever it is in use.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
from mutants import hunks
from virtual_machine import SOURCE, Mutation

TESTS = Path(__file__).parent.parent


@dataclass(frozen=True)
class SourceMutant:
    """`test` is a test as pytest names it, below tests/."""

    name: str
    test: str
    mutation: Mutation

    def __str__(self) -> str:
        return self.name

    @property
    def module(self) -> str:
        return "flux_megatron." + self.mutation.path.removesuffix(".py").replace("/", ".")

    @property
    def test_file(self) -> Path:
        return TESTS / self.test.partition("::")[0]


SOURCE_MUTANTS = [
    SourceMutant(title, test, mutation)
    for title, test, mutation in hunks(Path(__file__).with_name("source_mutants.diff"), "test")
]


def outcome(mutant: SourceMutant, log: Path) -> int:
    """pytest's exit code of the mutant's test, 1 if it has failed; its output goes to `log`."""
    if str(mutant.test_file.parent) not in sys.path:
        sys.path.insert(0, str(mutant.test_file.parent))
    module = importlib.import_module(mutant.test_file.stem)  # once here, not once in each fork
    if "ranks" in sys.modules:
        sys.modules["ranks"].prepare()
    gc.freeze()  # else each fork collects, and so copies, what these imports have made
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 99
    try:
        for descriptor in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        if "rank_pool" in sys.modules:
            sys.modules["rank_pool"]._pools.clear()  # they are the parent's
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # finding them takes seconds
        if "rank_process" in sys.modules and not hasattr(module, "RankFailure"):
            # the test has failed with its first rank: nobody reads what the others say later
            sys.modules["rank_process"].AFTER_A_FAILURE_S = 0
        code = int(pytest.main(
            [f"{TESTS / mutant.test}", "-q", "--tb=native", "-p", "no:cacheprovider",
             "-p", "pytest_timeout"],
            plugins=[_Replacing(mutant, log.with_name("mutant.py"))],
        ))  # fmt: skip
    finally:
        os._exit(code)


class _Replacing:
    """A plugin of pytest: replaces the module when the test has been imported."""

    def __init__(self, mutant: SourceMutant, file: Path) -> None:
        self._mutant, self._file = mutant, file

    def pytest_collection_finish(self) -> None:
        test = sys.modules[self._mutant.test_file.stem]
        if pretend := getattr(test, "pretend", None):  # what the module imports may not be there
            pretend()
        module = importlib.import_module(self._mutant.module)
        replace(module, self._mutant.mutation, self._file)
        # a test's script, in a process of its own, replaces it too
        os.environ["MUTANT"] = f"{self._mutant.module}={self._file}"


def replace(module: ModuleType, mutation: Mutation, file: Path) -> None:
    """Write the mutant of a module to `file`, where Triton's interpreter reads it, run it in the
    module, and let all that have imported something of it have that of the mutant.
    """
    before = dict(vars(module))
    file.write_text(mutation.apply((SOURCE / mutation.path).read_text()))
    exec(compile(file.read_text(), str(file), "exec"), vars(module))
    renewed: dict[int, Any] = {}
    for name, old in before.items():
        if getattr(old, "__module__", None) == module.__name__:
            renewed[id(old)] = vars(module)[name] = _renewed(old, vars(module)[name])
    for other in [*sys.modules.values()]:
        names = getattr(other, "__dict__", {})
        if other is module or renewed.keys().isdisjoint(map(id, names.values())):
            continue  # most of thousands
        for name, value in [*names.items()]:
            if id(value) in renewed:
                setattr(other, name, renewed[id(value)])


def _renewed(old: Any, new: Any) -> Any:
    """What stands for both: the old function or class, wherever it is kept, with the new body."""
    if isinstance(old, FunctionType) and isinstance(new, FunctionType):
        if old.__code__.co_freevars == new.__code__.co_freevars:
            old.__code__, old.__defaults__ = new.__code__, new.__defaults__
            for cell, other in zip(old.__closure__ or (), new.__closure__ or (), strict=True):
                cell.cell_contents = other.cell_contents  # of a decorator: what it calls
            return old
    elif isinstance(old, type) and not issubclass(old, (tuple, Enum)):
        for name, value in vars(new).items():
            if isinstance(value, FunctionType):
                setattr(old, name, _renewed(vars(old).get(name), value))
            elif not name.startswith("__") and not isinstance(value, type):
                setattr(old, name, value)
        return old
    return new
