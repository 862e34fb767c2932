"""Python."""

from __future__ import annotations

from flux_megatron.versions.library import Library

PYTHON = Library("Python", "", oldest="3.10", newest="3.13")
