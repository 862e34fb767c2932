"""The Hopper kernels of a product, from its own source, as kernels that run on virtual ranks.

`@gluon.jit` functions and aggregates are parsed, freed of decorators and annotations, and run with
the names of `emulated_gluon.py`. So a change of a kernel's source, a mutant's too, is a change of
what runs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from unittest import mock

from emulated_gluon import Gluon
from emulated_memory import Descriptor


class _Plain(ast.NodeTransformer):
    """Functions without decorators and annotations; `x.to(kind)` becomes `cast(x, kind)`.
    Aggregates as classes whose instances have the fields that they are made of.
    """

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        fields = [one.target.id for one in node.body if isinstance(one, ast.AnnAssign)]
        methods = [one for one in node.body if isinstance(one, ast.FunctionDef)]
        node.decorator_list = []
        node.body = [ast.Pass(), *map(self.visit_FunctionDef, methods)]
        names = ast.Tuple([ast.Constant(name) for name in fields], ast.Load())
        node.bases = [ast.Call(ast.Name("struct", ast.Load()), [names], [])]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.decorator_list = []
        for argument in node.args.args:
            argument.annotation = None
        self.generic_visit(node)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.Assign:
        self.generic_visit(node)
        return ast.Assign([node.target], node.value)

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            arguments = [node.func.value, *node.args]
            return ast.Call(ast.Name("cast", ast.Load()), arguments, node.keywords)
        return node


def _runs_on_the_device(node: ast.stmt) -> bool:
    """Whether it is a `gluon.jit` function or an aggregate."""
    decorators = [ast.unparse(one) for one in getattr(node, "decorator_list", ())]
    return any(one.startswith(("gluon.jit", "aggregate")) for one in decorators)


def parsed(module: ModuleType) -> tuple[CodeType, dict[str, object], dict[str, list[str]]]:
    """The functions and aggregates of a module, its constants, and the parameters of functions."""
    assert module.__file__ is not None
    file = Path(module.__file__)
    constants = {
        name: value.value for name, value in vars(module).items() if hasattr(value, "value")
    }
    code, parameters = _functions(file.read_text(), file.name)
    return code, constants, parameters


@cache  # most copies of the package have a change in another file
def _functions(source: str, name: str) -> tuple[CodeType, dict[str, list[str]]]:
    body = ast.parse(source).body
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    parameters = {node.name: [argument.arg for argument in node.args.args] for node in functions}
    taken = [node for node in body if _runs_on_the_device(node)]
    plain = ast.Module([_Plain().visit(node) for node in taken], [])
    return compile(ast.fix_missing_locations(plain), name, "exec"), parameters


def struct(fields: tuple[str, ...]) -> type:
    """What an emulated aggregate is a subclass of."""

    class Struct:
        def __init__(self, *values: object) -> None:
            vars(self).update(zip(fields, values, strict=True))

    return Struct


class HopperKernels:
    """Of one product; parsed once."""

    def __init__(self, product) -> None:
        self._product = product
        modules = {name: one for name, one in vars(product).items() if name.startswith("hopper_")}
        self._parsed = [*map(parsed, modules.values())]
        # of each module that has one, its kernel
        self.kernels = {name: f"{name}_kernel" for name, one in modules.items()
                        if hasattr(one, f"{name}_kernel")}  # fmt: skip

    @contextmanager
    def launched_on(self, gluon: Gluon) -> Iterator[None]:
        """The launchers launch the emulated kernels, on plain descriptors."""
        product, names, parameters = self._product, {"struct": struct}, {}
        for code, constants, of_functions in self._parsed:
            names |= constants
            parameters |= of_functions
            exec(code, names)
        names |= gluon.names()  # also in place of functions that hold PTX
        with ExitStack() as stack:
            for module, name in self.kernels.items():
                kernel = gluon.kernel(name, parameters[name], names[name])
                stack.enter_context(mock.patch.object(getattr(product, module), name, kernel))
            stack.enter_context(mock.patch.object(product.descriptors, "descriptor_of", Descriptor))
            stack.callback(product.triton_launch._launchers.clear)  # they hold these kernels
            yield
