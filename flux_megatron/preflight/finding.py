"""The findings about a node, and the output of the commands behind them."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "unfit", "not checked"]


@dataclass(frozen=True)
class Finding:
    """`unfit` excludes the node. `not checked` says why nothing is known: it never counts as ok."""

    status: Status
    text: str


class NotChecked(Exception):
    """A command that is not there, fails, or hangs."""


def output_of(command: Sequence[str], timeout_s: float) -> str:
    """Standard output of a command. `NotChecked` where it cannot be had."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except OSError as error:
        raise NotChecked(f"{command[0]}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise NotChecked(f"{' '.join(command)}: no answer in {timeout_s:g} s") from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise NotChecked(f"{' '.join(command)}: exit code {done.returncode}: {last}")
    return done.stdout
