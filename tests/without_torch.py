"""A process in which what only ranks need cannot be imported: torch, and what comes with it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from started import python

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
    return python("-c", f"import sys; {absent}{code}", *words, folder=folder, code=expected)
