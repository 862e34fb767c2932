"""What a field, method or constructor argument of Megatron means for our layers: `seams.tsv`.

The classes are those of `arguments`. A field without a row of its own has that of the argument of
its name. Whoever builds a model in Python, without Megatron's command line, passes no other check
than these.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from flux_megatron import settings
from flux_megatron.integration import arguments
from flux_megatron.integration.arguments import CLASSES, Row

FILE = Path(__file__).with_name("seams.tsv")
CONFIGS = ("MLATransformerConfig", "TransformerConfig", "ModelParallelConfig")
# of `experimental_attention_variant`, the last two from 0.20 on
GATED_DELTA_NETS = ("gated_delta_net", "gdn", "gdn2")
CANNOT = "flux_megatron's layers cannot go with this configuration:"
_UNKNOWN = "flux_megatron does not know this field"


@cache
def table() -> dict[tuple[str, str], Row]:
    """The rows by seam and name. `ValueError` names a line that is none."""
    rows: dict[tuple[str, str], Row] = {}
    for line in FILE.read_text(encoding="utf-8").splitlines()[1:]:
        cells = line.split("\t")
        if len(cells) != 4 or cells[2] not in CLASSES or (cells[0], cells[1]) in rows:
            raise ValueError(f"{FILE.name}: {line!r} given, a seam, a new name, one of {CLASSES} "
                             "and a reason expected, with tabs between them")  # fmt: skip
        rows[cells[0], cells[1]] = Row(*cells[1:])
    return rows


def row_of_field(name: str) -> Row | None:
    """The row of a field of Megatron's configurations, or None for one that nobody decided on."""
    if own := table().get(("config", name)):
        return own
    dashes = name.replace("_", "-")
    rows = [
        arguments.table()[option]
        for option in (f"--{dashes}", f"--no-{dashes}", f"--disable-{dashes}", f"--{name}")
        if option in arguments.table()
    ]
    return max(rows, key=lambda row: CLASSES.index(row.kind), default=None)


def check_config(config: Any, ignored: Collection[str] = ()) -> None:
    """`ValueError` that lists what this configuration asks for and our layers do not do.

    `ignored` fields are not for the layer that asks. What is untried or unknown goes on where
    `--flux-allow` or FLUX_MEGATRON_ALLOW names it.
    """
    if refused := list(_refused(config, ignored)):
        lines = "\n".join(f"  {line}" for line in refused)
        raise ValueError(f"{CANNOT}\n{lines}")


def wrong_values(holder: Any) -> Iterator[tuple[str, Any, str, bool]]:
    """Of a configuration, or of parsed arguments with names of its fields: those whose other values
    work, with their values, why these do not, and whether nothing but a trial is missing: such
    values go on where they are allowed.
    """
    if getattr(holder, "transformer_impl", None) == "inference_optimized":
        why = "its linear layers have an inference path of their own, which ours have not"
        yield "transformer_impl", "inference_optimized", why, False
    variant = getattr(holder, "experimental_attention_variant", None)
    if variant not in (None, *GATED_DELTA_NETS):
        why = f"one of {', '.join(GATED_DELTA_NETS)} expected"
        yield "experimental_attention_variant", variant, why, False
    if getattr(holder, "delay_wgrad_compute", False) and _te_captures_layers(holder):
        why = "TransformerEngine's graphs take delayed gradients of its own layers alone"
        yield "delay_wgrad_compute", True, why, False
    if getattr(holder, "defer_embedding_wgrad_compute", False) and (
        getattr(holder, "mtp_num_layers", None)
    ):
        why = (
            "with multi-token prediction Megatron itself takes the LM head's inputs in the order "
            "of forward and their gradients in that of backward"
        )
        yield "defer_embedding_wgrad_compute", True, why, True
    whole = "whole iterations were never captured with our calls in them"
    for name in ("cuda_graph_impl", "cuda_graph_scope", "cuda_graph_modules"):
        several = _several(getattr(holder, name, None))
        if any(getattr(one, "name", one) == "full_iteration" for one in several):
            yield name, "full_iteration", whole, True


def _te_captures_layers(holder: Any) -> bool:
    """Whether TransformerEngine's graphs have dense layers of 16 bits in them: the calls of
    `backward_dw` that it captures are those of its own classes.
    """
    asked = getattr(holder, "external_cuda_graph", False)  # the name of it up to 0.14
    if not asked and getattr(holder, "cuda_graph_impl", None) != "transformer_engine":
        return False
    if getattr(holder, "fp8", None) is not None:
        return False
    scopes = {
        getattr(one, "name", one)
        for name in ("cuda_graph_scope", "cuda_graph_modules")
        for one in _several(getattr(holder, name, None))
    }
    shared = getattr(holder, "moe_shared_expert_intermediate_size", None)
    return not scopes - {"full"} or "attn" in scopes or ("moe_router" in scopes and bool(shared))


def _several(given: Any) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, (list, tuple)) else (given,) if given else ()


def unknown_arguments(layer: type, given: dict[str, Any]) -> dict[str, Any]:
    """Of the arguments `given` to the constructor of Megatron's `layer`: those that are not at
    their defaults and in no release that we know. What they do in its forward is not known either.
    """
    defaults = _defaults(layer)
    return {
        name: value
        for name, value in given.items()
        if ("linear", name) not in table() and value is not defaults.get(name)
    }


def _refused(config: Any, ignored: Collection[str]) -> Iterator[str]:
    kind = next((c for c in type(config).__mro__ if _is_megatrons(c)), None)
    allowed = {name.lstrip("-").replace("_", "-") for name in settings.get().allow}
    for name, default, row in _watched(kind) if kind else ():
        value = getattr(config, name, default)
        if name in ignored or value is default or value == default:
            continue
        names = {name.replace("_", "-"), row.option.lstrip("-").replace("_", "-")}
        if row.kind == "refused":
            yield f"{name} is {value!r}: {row.because}"
        elif not names & allowed:
            way_on = f"FLUX_MEGATRON_ALLOW={name} goes on"
            yield f"{name} is {value!r}: {row.because}; {way_on}"
    for name, value, why, may_be_allowed in wrong_values(config):
        way_on = f"; FLUX_MEGATRON_ALLOW={name} goes on" if may_be_allowed else ""
        if not may_be_allowed or name.replace("_", "-") not in allowed:
            yield f"{name} is {value!r}: {why}{way_on}"


@cache
def _watched(kind: type) -> tuple[tuple[str, Any, Row], ...]:
    """The fields that must stay at Megatron's defaults: a few of some three hundred."""
    found = []
    for field in dataclasses.fields(kind):
        row = row_of_field(field.name) or Row(field.name, "untried", _UNKNOWN)
        if row.kind in ("refused", "untried"):
            made = field.default_factory
            default = field.default if made is dataclasses.MISSING else made()
            found.append((field.name, default, row))
    return tuple(found)


def _is_megatrons(kind: type) -> bool:
    """Subclasses of users and of other packages have fields and defaults of their own."""
    return kind.__module__.startswith("megatron.core.") and kind.__name__ in CONFIGS


@cache
def _defaults(layer: type) -> dict[str, Any]:
    parameters = inspect.signature(layer).parameters
    return {name: parameter.default for name, parameter in parameters.items()}
