"""Compiled kernels of the last run, which serve again while nothing that makes them has changed.

A result is found by Triton's own key: the source of the kernel and of all that it calls, its types
and constants, the options, the compiler and the assembler; and by the digest of the scripts that
compile. `pytest --cache-clear` forgets all of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / ".pytest_cache" / "d" / "compiled"
LAST = "LAST_CODE_OF_TESTS"  # names the file with the results of the last run


def compiled_or_kept(source: Any, target: Any, options: dict, make: Callable[[], dict]) -> dict:
    """What `make` gives, which compiles `source`; with the key by which the next run finds it."""
    key = _key(source, target, options)
    return _last_results().get(key) or {**make(), "key": key}


def last_results_of(script: str) -> Path:
    return FOLDER / f"{Path(script).stem}.json"


def keep(results: Path, script: str) -> None:
    """For the next run. Several processes may do so at once."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    part = last_results_of(script).with_suffix(f".{os.getpid()}")
    shutil.copyfile(results, part)
    part.replace(last_results_of(script))


def _key(source: Any, target: Any, options: dict) -> str:
    from triton.compiler.compiler import (
        get_cache_invalidating_env_vars,
        get_cache_key,
        make_backend,
    )

    backend = make_backend(target)
    parsed = backend.parse_options({**options, **source.parse_options()})
    key = get_cache_key(source, backend, parsed, env_vars=get_cache_invalidating_env_vars())
    # Triton's has the values of constants without their names
    constants = sorted((str(place), str(value)) for place, value in source.constants.items())
    return hashlib.sha256(f"{key} {constants} {_scripts()}".encode()).hexdigest()


@cache
def _scripts() -> str:
    files = [*sorted(HERE.glob("compile_*.py")), Path(__file__)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@cache
def _last_results() -> dict[str, dict]:
    file = Path(os.environ.get(LAST, os.devnull))
    results = json.loads(file.read_text()) if file.is_file() else {}
    return {result["key"]: result for result in results.values()}
