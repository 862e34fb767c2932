"""Compiled kernels of the last run, which serve again while nothing that makes them has changed.

A result is found by what a launch is compiled for, the source of its kernel and of all that it
calls, the GPU, the compiler and the assembler; and by the digest of the scripts that compile.
`pytest --cache-clear` forgets all of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flux_megatron.kernels.triton_launch import Code

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / ".pytest_cache" / "d" / "compiled"
LAST = "LAST_CODE_OF_TESTS"  # names the file with the results of the last run


def compiled_or_kept(code: Code, architecture: int, make: Callable[[], dict]) -> dict:
    """What `make` gives, which compiles the code for sm_<architecture>; with the key by which the
    next run finds it.
    """
    key = _key(code, architecture)
    return _last_results().get(key) or {**make(), "key": key}


def last_results_of(script: str) -> Path:
    return FOLDER / f"{Path(script).stem}.json"


def keep(results: Path, script: str) -> None:
    """For the next run. Several processes may do so at once."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    part = last_results_of(script).with_suffix(f".{os.getpid()}")
    shutil.copyfile(results, part)
    part.replace(last_results_of(script))


def _key(code: Code, architecture: int) -> str:
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import get_cache_invalidating_env_vars, make_backend

    from flux_megatron.kernels.compiled_ahead import mark_of
    from flux_megatron.kernels.triton_launch import hash_in_order

    kernel = getattr(import_module(code.module), code.kernel)
    hash_in_order(kernel)
    made_by = make_backend(GPUTarget("cuda", architecture, 32)).hash()
    environment = sorted(get_cache_invalidating_env_vars().items())
    return mark_of(code, f"{kernel.cache_key} {made_by} {environment} {_scripts()}")


@cache
def _scripts() -> str:
    files = [*sorted(HERE.glob("compile_*.py")), Path(__file__)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@cache
def _last_results() -> dict[str, dict]:
    file = Path(os.environ.get(LAST, os.devnull))
    results = json.loads(file.read_text()) if file.is_file() else {}
    return {result["key"]: result for result in results.values()}
