"""The table of docs/reference/environment.md: `python scripts/reference_tables.py` renews it from
the docstring of `settings.py`.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
VARIABLES = ROOT / "docs" / "reference" / "environment.md"


def variables() -> str:
    docstring = ast.get_docstring(ast.parse((ROOT / "flux_megatron/settings.py").read_text())) or ""
    rows = [line for line in docstring.splitlines() if line.startswith("|")]
    return re.sub(r"^\| (FLUX\w+)", r"| `\1`", "\n".join(rows), flags=re.MULTILINE)


def block(name: str, table: str) -> str:
    return f"<!-- {name} -->\n{table}\n<!-- end of {name} -->"


def renew(page: Path, name: str, table: str) -> None:
    old = re.compile(rf"<!-- {name} -->.*<!-- end of {name} -->", re.DOTALL)
    page.write_text(old.sub(lambda _: block(name, table), page.read_text()))


if __name__ == "__main__":
    renew(VARIABLES, "variables", variables())
