"""Keep shipped plans whose sources were edited without a change of what runs.

    python scripts/rekey_plans.py FILE COMMIT

Entries of FILE that were measured with the sources of COMMIT get the digest of today's, all others
stay. Read the difference before: this script cannot tell whether the edits change what runs.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from flux_megatron.tuning.environment import sources_digest


def main(file: Path, commit: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", commit, "flux_megatron"], stdout=subprocess.PIPE, check=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        old = f'"sources": "{sources_digest(Path(folder) / "flux_megatron")}"'
    text = file.read_text()
    file.write_text(text.replace(old, f'"sources": "{sources_digest()}"'))
    print(f"{text.count(old)} entries have the digest of today's sources")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
