"""docs/arguments.md: what each argument of each recorded release of Megatron-LM means for us.

`python scripts/argument_page.py` writes it; after a new release has been recorded it first names
the options that nobody has classified.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from flux_megatron.integration import arguments, parser_signature

PAGE = Path(__file__).parents[1] / "docs" / "arguments.md"
HEAD = """# Arguments of Megatron-LM beside `--flux-overlap`

`python scripts/argument_page.py` writes this page from `flux_megatron/integration/arguments.tsv`.
[Use in Megatron](megatron.md#what-is-refused-before-the-run-starts) says what happens when an
argument is not at its default.
"""
TABLE = "## {}\n\n| arguments | reason |\n| --- | --- |"
REST = """## Supported or harmless

All others go on. Tests show that {} are supported; other code than our layers reads {}: data,
optimizer, logs, checkpoints. `arguments.tsv` names the test or the reader of each. An argument that
is not in that file is untried.
"""


def options_by_release() -> dict[str, frozenset[str]]:
    """What each recorded parser accepts, oldest release first."""
    recorded = parser_signature.recorded()
    return {release: frozenset(recorded[release]) for release in parser_signature.releases()}


def unclassified() -> list[str]:
    """Options of recorded parsers that the table lacks."""
    return sorted(frozenset().union(*options_by_release().values()) - arguments.table().keys())


def page() -> str:
    rows = arguments.table().values()
    of_class = {kind: [r for r in rows if r.kind == kind] for kind in arguments.CLASSES[::-1]}
    lines = [HEAD]
    for kind in ("refused", "untried"):
        lines.append(TABLE.format(kind.capitalize()))
        lines += [
            f"| {_names(row for row in of_class[kind] if row.because == why)} | {why} |"
            for why in dict.fromkeys(row.because for row in of_class[kind])
        ]
        lines.append("")
    lines.append(REST.format(len(of_class["supported"]), len(of_class["harmless"])))
    return "\n".join(lines)


def _names(rows: Iterable[arguments.Row]) -> str:
    return ", ".join(f"`{row.option}`" for row in rows)


if __name__ == "__main__":
    if missing := unclassified():
        sys.exit(f"not in the table: {' '.join(missing)}")
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
