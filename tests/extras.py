"""Test files that need a package of our extras are left out where it is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

import pytest

# what `pip install -e .` does not bring, by the names of imports
PACKAGES = (
    "hatchling", "jinja2", "matplotlib", "megatron", "psutil", "pydantic", "rich", "scipy",
    "transformer_engine", "transformers", "typer", "yaml",
)  # fmt: skip


class Module(pytest.Module):
    """Skipped, with its reason, where a package is missing that it or what it imports needs."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except self.CollectError as error:
            name = (getattr(error.__cause__, "name", None) or "").partition(".")[0]
            if name not in PACKAGES or importlib.util.find_spec(name) is not None:
                raise
        return pytest.skip(f"needs {name}", allow_module_level=True)
