"""Parts of layer specifications: a ModuleSpec, or from 0.17 on a partial in its place."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from megatron.core.extensions import transformer_engine
from megatron.core.transformer import multi_token_prediction

from flux_megatron.versions.megatron_core import MEGATRON_CORE


def submodules_of(part: Any) -> Any:
    return part.keywords["submodules"] if isinstance(part, functools.partial) else part.submodules


def module_of(part: Any) -> Any:
    if not isinstance(part, functools.partial):
        return part.module
    return getattr(part.func, "__self__", part.func)  # a class or a method of it that builds one


def skip_where_mtp_needs_te(config: dict[str, Any]) -> None:
    """Main d98e8a64 asks for instances of a class that is a stand-in then, of stock layers too."""
    asks = hasattr(multi_token_prediction, "is_inference_column_parallel_linear")
    if config.get("mtp_num_layers") and asks and not transformer_engine.HAVE_TE:
        pytest.skip("this megatron-core builds multi-token prediction with TransformerEngine alone")


def skip_before(version: str, reason: str) -> None:
    """Where stock layers cannot do it."""
    if not MEGATRON_CORE.since(version):
        pytest.skip(f"stock layers before {version}: {reason}")
