"""Markdown of the written pages: tables, and blocks that a reader unfolds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def folded(summary: str, text: str) -> str:
    """`text` behind its summary. `markdown` makes mkdocs (`md_in_html`) render it."""
    return f'<details markdown="1"><summary>{summary}</summary>\n\n{text}\n\n</details>'
