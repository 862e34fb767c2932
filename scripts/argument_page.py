"""docs/arguments.md: what each argument of each recorded release of Megatron-LM means for us.

`python scripts/argument_page.py` writes it; after a new release has been recorded it first names
the options that nobody has classified.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from flux_megatron.integration import arguments
from flux_megatron.launch import parser_signature

PAGE = Path(__file__).parents[1] / "docs" / "arguments.md"
HEAD = """# Arguments of Megatron-LM beside `--flux-overlap`

Written by `python scripts/argument_page.py` from
`flux_megatron/integration/arguments.tsv`; change that file.
[Use in Megatron](megatron.md#what-is-refused-before-the-run-starts) says what happens when
an argument is not at its default. Releases: those whose parsers have the argument, `main` is
d98e8a64.
"""
TABLE = "## {}\n\n| argument | reason | releases |\n| --- | --- | --- |"
# collapsed on the site and on code hosts
FOLDED = """## Supported

<details markdown="1"><summary>All {}</summary>

| test | arguments (releases, if not all) |
| --- | --- |"""
HARMLESS = """## Harmless

Other code than our layers reads {} arguments: data, optimizer, logs, checkpoints.
`arguments.tsv` lists each with what reads it. An argument that is not in that file is untried.
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
    counts = ", ".join(f"{len(found)} {kind}" for kind, found in of_class.items())
    lines = [HEAD, f"{len(rows)} arguments: {counts}.\n"]
    for kind in ("refused", "untried"):
        lines.append(TABLE.format(kind.capitalize()))
        lines += [f"| `{r.option}` | {r.because} | {_releases(r.option)} |" for r in of_class[kind]]
        lines[-1] += "\n"
    lines.append(FOLDED.format(len(of_class["supported"])))
    lines += [
        f"| `{test.partition('/')[2] or test}` | {names} |"
        for test, names in _grouped(of_class["supported"])
    ]
    lines += ["\n</details>\n", HARMLESS.format(len(of_class["harmless"]))]
    return "\n".join(lines)


def _grouped(rows: Iterable[arguments.Row]) -> Iterator[tuple[str, str]]:
    reasons: dict[str, list[str]] = {}
    for row in rows:
        releases = _releases(row.option)
        name = f"`{row.option}`" + ("" if releases == "all" else f" ({releases})")
        reasons.setdefault(row.because, []).append(name)
    for because in sorted(reasons):
        yield because, ", ".join(reasons[because])


@cache
def _releases(option: str) -> str:
    """As "0.16.1 to main"; a parser never takes an option back that it had dropped."""
    versions = {r: r.removeprefix("core_v").partition("-")[0] for r in parser_signature.releases()}
    having = [versions[r] for r, options in options_by_release().items() if option in options]
    if len(having) == len(versions):
        return "all"
    return having[0] if len(having) == 1 else f"{having[0]} to {having[-1]}"


if __name__ == "__main__":
    if missing := unclassified():
        sys.exit(f"not in the table: {' '.join(missing)}")
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
