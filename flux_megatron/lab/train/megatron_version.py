"""Whether `train` and `generate` can use the installed megatron-core: read, not imported."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from flux_megatron.lab.train.config import ConfigError

OLDEST = (0, 15)  # 0.14 has neither the base of tokenizers nor checkpoints written by a rank itself


def check() -> None:
    """`ConfigError` for one that is too old; without any, imports say so."""
    found = _version()
    if found is not None and found[:2] < OLDEST:
        given, oldest = (".".join(map(str, numbers)) for numbers in (found, OLDEST))
        raise ConfigError(
            f"megatron-core {given} given, {oldest} or newer expected by flux-megatron train and "
            f"generate: pip install 'megatron-core>={oldest}' (flux-megatron run takes {given})"
        )


def _version() -> tuple[int, ...] | None:
    try:
        spec = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        return None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        file = Path(folder) / "package_info.py"
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        parts = dict(re.findall(r"^(MAJOR|MINOR|PATCH) *= *(\d+)", text, re.MULTILINE))
        if len(parts) == 3:
            return tuple(int(parts[name]) for name in ("MAJOR", "MINOR", "PATCH"))
    return None
