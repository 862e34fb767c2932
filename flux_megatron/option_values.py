"""What commands are given: numbers, names, and places to write. Each check is made before a command
begins its work, and its error is one line.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flux_megatron.errors import BadInput, RunFailed

STDOUT = Path("-")


def numbers(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers above 0, as in "64,128"; at least one."""
    given = [word.strip() for word in text.split(",") if word.strip()]
    if not given or not all(word.isdecimal() and int(word) for word in given):
        raise BadInput(
            f"{option} {text!r} given, whole numbers above 0 with commas between expected, "
            "such as 8192,4096"
        )
    return tuple(map(int, given))


def names(option: str, text: str, known: Iterable[str]) -> tuple[str, ...]:
    """Some of the `known` names, as in "ag_gemm,gemm_rs"; at least one."""
    given = tuple(word.strip() for word in text.split(",") if word.strip())
    known = [*known]
    for one in given or (text,):
        name(option, one, known)
    return given


def name(option: str, text: str, known: Iterable[str]) -> str:
    """One of the `known` names."""
    known = [*known]
    if text not in known:
        raise BadInput(f"{option} {text!r} given, {nearest(text, known)}")
    return text


def nearest(name: str, known: Iterable[str]) -> str:
    """What is expected in place of `name`, with the nearest of the `known` names first."""
    known = [*known]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"{f'{near[0]}? ' if near else ''}one of {', '.join(known)} expected"


def number(option: str, value: float | None, *, zero: bool = False, unit: str = "") -> None:
    """`value` is finite and above 0, or 0 where `zero` is allowed. None was not given."""
    if value is None or (math.isfinite(value) and (value > 0 or (zero and value == 0))):
        return
    expected = f"a finite number of {unit}" if unit else "a finite number"
    raise BadInput(f"{option} {value:g} given, {expected} {'from 0 on' if zero else 'above 0'} "
                   "expected")  # fmt: skip


def absolute(path: Path | str) -> Path:
    """As `Path.resolve`, which raises at a loop of links: whoever opens it says that better."""
    return Path(os.path.realpath(path))


def folder(option: str, path: Path) -> None:
    """Files can be written into the folder `path`, which is made where it does not exist."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path, buffering=0) as room:
            room.write(b"x")  # a full disk may take a file, but not what is in it
    except OSError as error:
        raise BadInput(
            f"{option} {path}: {_reason(error)}; a folder that can be written expected"
        ) from None


def json_target(path: Path) -> None:
    """`--json` names a file that can be written, or - for stdout. Its folder is made; what is in it
    stays.
    """
    if path == STDOUT:
        return
    try:
        new = not path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
        if new:
            path.unlink()
    except OSError as error:
        raise BadInput(
            f"--json {path}: {_reason(error)}; a file that can be written expected"
        ) from None


def replace(path: Path, text: str) -> None:
    """Atomically: who reads meanwhile sees the old file or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    os.replace(partial, path)


def write_json(path: Path, values: Any) -> None:
    text = json.dumps(values, indent=2)
    if path == STDOUT:
        print(text)
        return
    with writing("--json", path):
        path.write_text(text + "\n")


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """`RunFailed` with the option in place of what a disk raises that has filled up meanwhile."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise RunFailed(f"{option} {path}: {where} not written: {_reason(error)}") from None


def _reason(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()
