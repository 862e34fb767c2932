"""Keep shipped plans whose sources were edited without a change of what runs.

    python scripts/rekey_plans.py FILE COMMIT

Entries of FILE that were measured with the sources of COMMIT get the digest of today's. Read the
difference before, of the files that the strategies import: this script cannot tell whether the
edits change what runs. All other entries are left as they are.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from flux_megatron.tuning import plan_cache
from flux_megatron.tuning.environment import PACKAGE, sources_digest
from flux_megatron.tuning.plan_entry import Entry


def main(file: Path, commit: str) -> None:
    entries, left_out = plan_cache.read_file(file)
    assert not left_out, left_out
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", commit, "flux_megatron"], stdout=subprocess.PIPE, check=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        package = Path(folder) / "flux_megatron"

        def rekeyed(entry: Entry) -> Entry:
            strategy, where = entry.plan.strategy, entry.environment
            if where.sources != sources_digest(package, strategy):
                return entry
            today = replace(where, sources=sources_digest(PACKAGE, strategy))
            return replace(entry, environment=today)

        new = [rekeyed(entry) for entry in entries]
    changed = sum(a != b for a, b in zip(entries, new, strict=True))
    if changed:
        plan_cache.write_file(file, new)
    print(f"{changed} of {len(entries)} entries have new digests")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
