"""Specifications that name their linear layers and ask no provider: those of T5 and BERT, of vision
models, and of hybrid ones.

Attention, MLPs and the linear layers of Mamba's mixers and of gated delta nets become ours there
too.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec

from flux_megatron.integration import replaced

# these are finished when they are imported, and have mixers of other kinds beside these layers
HYBRID = (
    "megatron.core.models.mamba.mamba_layer_specs",
    "megatron.core.models.hybrid.hybrid_layer_specs",
)
MIXED = ("linear_qkv", "linear_q", "linear_kv", "linear_proj", "linear_fc1", "linear_fc2")
MIXERS = ("MambaMixerSubmodules", "GatedDeltaNetSubmodules")  # all of their linear layers


def use(replacements: Mapping[Any, Any], norm: Any = None, named: str | None = None) -> None:
    """Put our classes in place of those that they replace, in every such module that a script
    has loaded and in the one that `--spec` has `named`; and a `norm`, if given, where Megatron
    takes one by what is installed.
    """
    if named in HYBRID:
        importlib.import_module(named)
    # what these name is found in their globals when a function of theirs is called
    named_in = replaced.row("RowParallelLinear")
    for name in (*named_in.where, *HYBRID):
        module = sys.modules.get(name)
        if module is None:
            continue
        here, names = dict(replacements), MIXED if name in HYBRID else None
        if norm is not None and "LNImpl" in vars(module):
            here[module.LNImpl] = norm
        for name, value in list(vars(module).items()):
            if isinstance(value, ModuleSpec):
                substitute(value, here, names)
            elif name in named_in.names and isinstance(value, type) and value in here:
                replaced.put(module, name, here[value])


def substitute(spec: Any, replacements: Mapping[Any, Any], names: Collection[str] | None) -> None:
    """In a specification and all its members; if given, in those of these `names` alone, and in all
    of `MIXERS`.
    """
    of_mixer = type(spec).__name__ in MIXERS
    for name, value in list(_members(spec)):
        if not isinstance(value, type):
            substitute(value, replacements, names)
        elif value in replacements and (names is None or of_mixer or name in names):
            setattr(spec, name, replacements[value])


def _members(spec: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(spec, functools.partial):
        return spec.keywords.items()
    if isinstance(spec, (list, tuple)):
        return (("", each) for each in spec)
    return vars(spec).items() if dataclasses.is_dataclass(spec) else ()
