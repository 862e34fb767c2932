"""Programs that tests run in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path


def ran(
    *command: object, code: int | None = 0, folder: Path | str | None = None, limit_s: float = 120,
    **variables: str | None,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """The command when it has ended, with this exit code; None: with any. `variables` beside those
    of this process; None: without it.
    """
    given = {name: text for name, text in (os.environ | variables).items() if text is not None}
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=given, capture_output=True, text=True,
        timeout=limit_s,
    )  # fmt: skip
    assert code is None or done.returncode == code, done.stdout + done.stderr
    return done


python = partial(ran, sys.executable)


def executable(file: Path, text: str) -> Path:
    """One that can be run, in a folder that is made for it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)
    return file
