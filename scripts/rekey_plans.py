"""Keep shipped plans whose sources were edited without a change of what runs.

    python scripts/rekey_plans.py FILE COMMIT [PYTHON]

Entries of FILE that were measured with the sources of COMMIT get the digest of today's. Read the
difference before, of the files that the strategies import: this script cannot tell whether the
edits change what runs. All other entries are left as they are.

The digest of format 1, of all sources at once, depends on the version of Python that took it (3.12
for the plans of 2026-11-22): PYTHON is one.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from flux_megatron.overlap import plan_cache
from flux_megatron.overlap.environment import PACKAGE, sources_digest
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


def main(file: Path, commit: str, python: str | None = None) -> None:
    entries, complaints = plan_cache.read_file(file)
    assert not complaints, complaints
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", commit, "flux_megatron"], stdout=subprocess.PIPE, check=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        package = Path(folder) / "flux_megatron"
        old = f"format 1: {old_digest(python, package)}" if python else ""

        def rekeyed(entry: Entry) -> Entry:
            strategy, where = entry.plan.strategy, entry.environment
            if where.sources not in (old, sources_digest(package, strategy)):
                return entry
            today = replace(where, sources=sources_digest(PACKAGE, strategy))
            return replace(entry, environment=today)

        new = [rekeyed(entry) for entry in entries]
    plan_cache.write_file(file, new)
    changed = sum(a != b for a, b in zip(entries, new, strict=True))
    print(f"{changed} of {len(entries)} entries have new digests")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
