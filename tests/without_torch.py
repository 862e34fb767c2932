"""A process in which what only ranks need cannot be imported: torch, and what comes with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ABSENT = ("torch", "triton", "megatron")
COMMAND = "from flux_megatron.cli import app; app()"


def without_torch(
    *words: object,
    code: str = COMMAND,
    more: tuple[str, ...] = (),
    folder: Path | None = None,
    expected: int = 0,
) -> subprocess.CompletedProcess[str]:
    """`flux-megatron` with these words, or other code; `more` cannot be imported either."""
    absent = "".join(f"sys.modules[{name!r}] = None; " for name in (*ABSENT, *more))
    line = [sys.executable, "-c", f"import sys; {absent}{code}", *map(str, words)]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == expected, done.stderr
    return done
