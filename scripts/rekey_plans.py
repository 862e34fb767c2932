"""Give shipped plans of format 1 the digests of format 2, where what they ran is unchanged.

    python scripts/rekey_plans.py FILE COMMIT PYTHON

Format 1 has one digest of all sources, which depends on the version of Python that took it (3.12
for the plans of 2026-11-22). The entries of FILE whose digest is what PYTHON takes of COMMIT get
the digest that their plan's strategy has there; all others are left as they are. An entry is found
again if the strategy's sources are the same today.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from flux_megatron.overlap import plan_cache
from flux_megatron.overlap.environment import sources_digest
from flux_megatron.overlap.plan_entry import Entry

OLD_DIGEST = """
import ast, hashlib, sys
from pathlib import Path
not_run = ("beside choice dispatch environment norm plan_cache registry report timing trial "
           "tuner").split()
package, digest = Path(sys.argv[1]), hashlib.sha256()
files = [f for room in ("kernels", "overlap", "symm") for f in package.glob(f"{room}/*.py")]
for file in sorted(files):
    if file.stem in not_run:
        continue
    tree = ast.parse(file.read_text())
    for body in (getattr(node, "body", None) for node in ast.walk(tree)):
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            if isinstance(first.value.value, str):
                del body[0]
    digest.update(f"{file.relative_to(package)} {ast.unparse(tree)}\\n".encode())
print(digest.hexdigest()[:16])
"""


def old_digest(python: str, package: Path) -> str:
    command = [python, "-c", OLD_DIGEST, str(package)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def rekeyed(entry: Entry, package: Path, old: str) -> Entry:
    if entry.environment.sources != old:
        return entry
    sources = sources_digest(package, entry.plan.strategy)
    return replace(entry, environment=replace(entry.environment, sources=sources))


def main(file: Path, commit: str, python: str) -> None:
    own, complaints = plan_cache.read_file(file)
    assert not complaints, complaints
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", commit, "flux_megatron"], stdout=subprocess.PIPE, check=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        package = Path(folder) / "flux_megatron"
        old = old_digest(python, package)
        new = [rekeyed(entry, package, old) for entry in own]
    plan_cache.write_file(file, new)
    print(f"{sum(a != b for a, b in zip(own, new, strict=True))} of {len(own)} entries had {old}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
