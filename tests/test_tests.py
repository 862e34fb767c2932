"""What holds of the tests, as many run on few machines alone: their calls fit what they call, they
are collected where packages of our extras are not installed, and none finds what one before it in
the same ranks has replaced.
"""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import extras
import pytest
import rank_pool
import ranks

from flux_megatron import errors

TESTS = Path(__file__).parent
OURS = ("flux_megatron", *(file.stem for file in TESTS.rglob("*.py")))  # tops of modules' names
UNKNOWN = object()


def misfits(module: ModuleType) -> Iterator[str]:
    """Calls of our functions with other arguments than they take, and names our modules lack."""
    return _misfits(ast.parse(inspect.getsource(module)), vars(module))


def _misfits(node: ast.AST, known: dict[str, Any]) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
        bound = _bound_in(node)
        known = {name: value for name, value in known.items() if name not in bound}
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            try:
                _check(child, _value(child.func, known))
            except (TypeError, AttributeError) as error:
                yield f"line {child.lineno}: {ast.unparse(child)}: {error}"
        yield from _misfits(child, known)


def _bound_in(scope: ast.AST) -> set[str]:
    """Names that may mean something else there than in the module."""
    bound = set()
    for node in ast.walk(scope):
        if isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.alias):
            bound.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node is not scope:
            bound.add(node.name)
    return bound


def _value(node: ast.expr, known: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return known.get(node.id, UNKNOWN)
    owner = _value(node.value, known) if isinstance(node, ast.Attribute) else UNKNOWN
    if isinstance(owner, ModuleType) and owner.__name__.partition(".")[0] in OURS:
        return getattr(owner, node.attr)
    return getattr(owner, node.attr, UNKNOWN) if isinstance(owner, (ModuleType, type)) else UNKNOWN


def _check(call: ast.Call, function: Any) -> None:
    """Raise `TypeError` if it does not take what is given; what a star stands for is not known."""
    top = (getattr(function, "__module__", None) or "").partition(".")[0]
    if top not in OURS or not callable(function):
        return
    try:
        signature = inspect.signature(function)
    except ValueError:  # of C
        return
    given = [one for one in call.args if not isinstance(one, ast.Starred)]
    named = {one.arg: one for one in call.keywords if one.arg is not None}
    if (len(given), len(named)) == (len(call.args), len(call.keywords)):
        signature.bind(*given, **named)
    else:
        signature.bind_partial(**named)


def test_calls_fit():
    """Of all files that this process has collected, and of what they import."""
    modules = [one for one in [*sys.modules.values()] if inspect.ismodule(one)]
    of_tests = [one for one in modules if (vars(one).get("__file__") or "").startswith(f"{TESTS}/")]
    wrong = [f"{one.__file__} {said}" for one in of_tests for said in misfits(one)]
    assert not wrong, "\n".join(wrong)


def few(a, b=0, *, c=0):
    return a, b, c


@pytest.mark.parametrize(
    ("call", "right"),
    [("few(1)", True), ("few(1, 2, c=3)", True), ("few(*[], c=3)", True), ("few()", False),
     ("few(1, 2, 3)", False), ("few(1, d=2)", False), ("few(*[], d=2)", False),
     ("extras.nothing()", False), ("(lambda few: few())(int)", True)],
)  # fmt: skip
def test_a_call_that_does_not_fit_is_seen(call, right):
    assert right == (not [*_misfits(ast.parse(call), globals())])


@pytest.mark.parametrize("absent", [("megatron",), extras.PACKAGES], ids=["megatron", "all"])
def test_the_suite_is_collected_without(absent):
    code = f"""
import sys
sys.modules.update(dict.fromkeys({absent}))
import pytest
sys.exit(pytest.main(["--collect-only", "-q", "-n", "0", "-p", "no:cacheprovider", {str(TESTS)!r}]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=TESTS)
    assert done.returncode == 0, "\n".join(
        line for line in done.stdout.splitlines() if "::" not in line
    )


def replace(rank: int) -> list[object]:
    """What others have left, before it leaves the same."""
    found = [extras.PACKAGES, errors.RunFailed]
    extras.PACKAGES = errors.RunFailed = "replaced"
    return found


def test_what_ranks_replace_is_put_back_for_the_next_test():
    options = {"limit_s": 60, "environment": {}, "fresh": False, "device": ranks.DEVICE}
    rank_pool.run(replace, 1, (), **options)
    assert rank_pool.run(replace, 1, (), **options) == [[extras.PACKAGES, errors.RunFailed]]
