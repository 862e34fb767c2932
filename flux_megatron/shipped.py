"""The folders of files that we ship, such as `configs`."""

from __future__ import annotations

from pathlib import Path


def folder(name: str) -> Path:
    """In an installed package inside it, in a checkout beside it."""
    package = Path(__file__).parent
    inside = package / name
    return inside if inside.is_dir() else package.parent / name
