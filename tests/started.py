"""Programs that tests run in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path


def ran(
    *command: object, code: int | None = 0, folder: Path | str | None = None, limit_s: float = 120,
    **variables: str,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """The command when it has ended, with this exit code; None: with any. `variables` beside those
    of this process.
    """
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=os.environ | variables, capture_output=True,
        text=True, timeout=limit_s,
    )  # fmt: skip
    assert code is None or done.returncode == code, done.stdout + done.stderr
    return done


python = partial(ran, sys.executable)
