"""`replaced.tsv` against what happens: all that we replace in Megatron, and nothing else."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import side_by_side as sbs
import torch
from megatron.core.tensor_parallel import layers as stock_layers
from ranks import on_cpu_ranks

import flux_megatron
from flux_megatron.integration import autoload, building, install, replaced
from flux_megatron.integration.flags import FluxOptions
from flux_megatron.lab.cpu import pretend_cuda

HERE = Path(__file__).parent
# found where the rows' own tests bring Megatron's loop or TransformerEngine
ELSEWHERE = ("megatron.training.", "transformer_engine.")
WAYS_IN = {"--flux-overlap", "--flux-experts"}
Attributes = dict[tuple[str, str], Any]


def core() -> Attributes:
    """Every attribute of megatron-core's modules, and of the classes that they define."""
    found: Attributes = {}
    for module in [one for name, one in sys.modules.items() if name.startswith("megatron.core")]:
        if not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            found[module.__name__, name] = value
            if isinstance(value, type) and value.__module__ == module.__name__:
                place = f"{module.__name__}:{value.__qualname__}"
                found |= {(place, inner): one for inner, one in vars(value).items()}
    return found


def changed(before: Attributes) -> set[tuple[str, str]]:
    now = core()
    return {key for key in before.keys() & now.keys() if now[key] is not before[key]}


def rows_of(place: str, name: str) -> list[replaced.Row]:
    return [row for row in replaced.table() if name in row.names and place in row.where]


def load_all_places() -> None:
    for place in {one.partition(":")[0] for row in replaced.table() for one in row.where}:
        if place.startswith("megatron.core."):
            with contextlib.suppress(ModuleNotFoundError):  # of another release
                importlib.import_module(place)


@on_cpu_ranks(1)
def test_what_is_replaced_is_what_the_table_says(rank):
    pretend_cuda()
    load_all_places()
    before = core()
    install.install(FluxOptions(experts=True), of_te=True)
    install.install(FluxOptions(experts=True))
    launched = changed(before)
    building.stop()
    between = core()
    autoload.arm(flux_megatron.enable)
    assert changed(between) == {
        ("megatron.core.parallel_state", "initialize_model_parallel"),
        ("megatron.core.transformer.module:MegatronModule", "__init__"),
    }
    assert autoload._watch not in sys.meta_path, "it has seen all that it waits for"
    flux_megatron.enable(experts=True)
    enabled = changed(between)
    flux_megatron.disable()
    assert not changed(between)
    for keys, ways in ((launched, WAYS_IN), (enabled, {"enable"})):
        found = {key: [r for r in rows_of(*key) if ways & {*r.asked_by.split()}] for key in keys}
        assert [key for key, rows in found.items() if not rows] == []
        expected = {
            row
            for row in replaced.table()
            if ways & {*row.asked_by.split()} and row.where[0].startswith("megatron.")
            and not row.where[0].startswith(ELSEWHERE)
        }  # fmt: skip
        assert expected <= {row for rows in found.values() for row in rows}


@on_cpu_ranks(1)
def test_patches_of_others_outlive_ours(rank):
    stock = stock_layers.ColumnParallelLinear
    sbs.start(1)
    config = sbs.settings(1, False, torch.float32)
    init_method = torch.nn.init.normal_

    def build() -> tuple[bool, str]:
        """Whether a layer is ours, and who else was there."""
        built = stock(8, 8, config=config, init_method=init_method, gather_output=False)
        return type(built) is not stock, built.patched

    def patch(name: str) -> None:
        init = stock.__init__

        @functools.wraps(init)
        def patched(self, *given, **named):
            init(self, *given, **named)
            self.patched = name

        stock.__init__ = patched

    flux_megatron.enable()
    patch("first")
    assert build() == (True, "first")
    flux_megatron.enable(layers=["head"])
    assert build() == (False, "first")
    flux_megatron.enable()
    assert build() == (True, "first")
    patch("second")
    flux_megatron.disable()
    assert build() == (False, "second")


def test_a_function_is_wrapped_once():
    """Megatron parses its arguments up to three times."""

    class Owner:
        def __init__(self) -> None: ...

    def wrap() -> None:
        @replaced.around(Owner, "__init__")
        def ours(original: Any, *given: Any) -> None:
            original(*given)

    wrap()
    wrap()
    assert not hasattr(Owner.__init__.__wrapped__, "__wrapped__")


def test_a_name_without_a_row_is_not_replaced():
    with pytest.raises(AssertionError, match="brand_new: no row of replaced"):
        replaced.put(install, "brand_new", None)


@pytest.mark.parametrize("row", replaced.table(), ids=lambda row: row.names[0])
def test_every_row_has_its_test(row):
    file, _, name = row.test.partition("::")
    tree = ast.parse((HERE / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert row.why
