"""The page of tables and the pictures, from rows: `python -m flux_megatron.lab.results.pages`.

Run it in the folder of the sources after a change of docs/results or configs/tuned. The page's text
and the heads of its tables are edited there; what lies below a head is written anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from flux_megatron.lab.results import charts
from flux_megatron.lab.results.committed_tables import TABLES

PAGE = Path("docs/reference/tables.md")
TABLE = re.compile(r"^## (?P<title>.*)\n(?P<text>(?:(?!## |\|).*\n)*)(?P<head>\|.*\n\| ---.*\n)"
                   r"(?:\|.*\n)*", re.M)  # fmt: skip


def page(root: Path) -> str:
    return TABLE.sub(lambda table: _made(table, root), (root / PAGE).read_text(encoding="utf-8"))


def _made(table: re.Match[str], root: Path) -> str:
    lines = (f"| {' | '.join(cells)} |\n" for cells in TABLES[table["title"]](root))
    return "".join([f"## {table['title']}\n", table["text"], table["head"], *lines])


def main(root: Path = Path()) -> None:
    (root / PAGE).write_text(page(root), encoding="utf-8")
    charts.write(root)


if __name__ == "__main__":
    main()
