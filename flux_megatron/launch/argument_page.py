"""docs/arguments.md: what each argument of each recorded release of Megatron-LM means for us.

`python -m flux_megatron.launch.argument_page` writes it; after a new release has been recorded it
first names the options that nobody has classified.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from flux_megatron.launch import parser_signature

if TYPE_CHECKING:
    from flux_megatron.integration.arguments import Row

PAGE = Path(__file__).parents[2] / "docs" / "arguments.md"
HEAD = """# Arguments of Megatron-LM beside `--flux-overlap`

Written by `python -m flux_megatron.launch.argument_page` from
`flux_megatron/integration/arguments.tsv`; change that file.
[Use in Megatron](megatron.md#what-is-refused-before-the-run-starts) says what happens when
an argument is not at its default. An argument that is not in the table is untried.

Releases: those whose parsers have the argument, `main` is d98e8a64.
"""

# collapsed on the site and on code hosts
FOLD = '<details markdown="1"><summary>{}</summary>'


def options_by_release() -> dict[str, frozenset[str]]:
    """What each recorded parser accepts, oldest release first."""
    return {
        release: frozenset(parser_signature.recorded()[release])
        for release in parser_signature.releases()
    }


def unclassified() -> list[str]:
    """Options of recorded parsers that the table lacks."""
    known = frozenset().union(*options_by_release().values())
    return sorted(known - _table().keys())


def page() -> str:
    rows = _table().values()
    of_class = {kind: [row for row in rows if row.kind == kind] for kind in _order()}
    counts = ", ".join(f"{len(found)} {kind}" for kind, found in of_class.items())
    parts = [HEAD, f"{len(rows)} arguments: {counts}.\n"]
    for kind in ("refused", "untried"):
        parts.append(
            f"## {kind.capitalize()}\n\n| argument | reason | releases |\n| --- | --- | --- |"
        )
        parts += [f"| `{r.option}` | {r.because} | {_releases(r.option)} |" for r in of_class[kind]]
        parts[-1] += "\n"
    for kind, what in (("supported", "test"), ("harmless", "what reads it")):
        count = len(of_class[kind])
        parts.append(f"## {kind.capitalize()}\n\n{FOLD.format(f'All {count}')}\n")
        parts.append(f"| {what} | arguments (releases, if not all) |\n| --- | --- |")
        parts += [f"| {_shown(why, kind)} | {names} |" for why, names in _grouped(of_class[kind])]
        parts.append("\n</details>\n")
    return "\n".join(parts)


def _grouped(rows: Iterable[Row]) -> Iterator[tuple[str, str]]:
    reasons: dict[str, list[str]] = {}
    for row in rows:
        releases = _releases(row.option)
        name = f"`{row.option}`" + ("" if releases == "all" else f" ({releases})")
        reasons.setdefault(row.because, []).append(name)
    for because in sorted(reasons):
        yield because, ", ".join(reasons[because])


def _shown(because: str, kind: str) -> str:
    return f"`{because.partition('/')[2] or because}`" if kind == "supported" else because


@cache
def _releases(option: str) -> str:
    """As "0.16.1 to main"; a parser never takes an option back that it had dropped."""
    versions = {r: r.removeprefix("core_v").partition("-")[0] for r in parser_signature.releases()}
    having = [versions[r] for r, options in options_by_release().items() if option in options]
    if len(having) == len(versions):
        return "all"
    return having[0] if len(having) == 1 else f"{having[0]} to {having[-1]}"


def _table() -> dict[str, Row]:
    from flux_megatron.integration import arguments

    return arguments.table()


def _order() -> tuple[str, ...]:
    from flux_megatron.integration import arguments

    return arguments.CLASSES[::-1]


if __name__ == "__main__":
    if missing := unclassified():
        sys.exit(f"not in the table: {' '.join(missing)}")
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
