"""Every FLUX_MEGATRON_* environment variable, read once and frozen.

| variable | meaning | default |
| --- | --- | --- |
| FLUX_MEGATRON_STRATEGY | `auto`, `fused`, `pipelined` or `sequential`, for every call | auto |
| FLUX_MEGATRON_STRICT | 1: raise where a call would run without overlap | 0 |
| FLUX_MEGATRON_TIMEOUT_S | seconds that any wait for another rank may take | 600 |
| FLUX_MEGATRON_POISON | 1: fill symmetric buffers with NaN after use, to find stale reads | 0 |
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

STRATEGIES = ("auto", "fused", "pipelined", "sequential")


@dataclass(frozen=True)
class Settings:
    strategy: str = "auto"
    strict: bool = False
    timeout_s: float = 600.0
    poison: bool = False


def _switch(environment: Mapping[str, str], name: str) -> bool:
    text = environment.get(name, "0")
    if text not in ("0", "1"):
        raise ValueError(f"{name}={text!r}, expected 0 or 1")
    return text == "1"


def read(environment: Mapping[str, str]) -> Settings:
    """Settings from a mapping of variables; `ValueError` names the variable that is wrong."""
    strategy = environment.get("FLUX_MEGATRON_STRATEGY", "auto")
    if strategy not in STRATEGIES:
        raise ValueError(f"FLUX_MEGATRON_STRATEGY={strategy!r}, expected one of {STRATEGIES}")
    timeout = environment.get("FLUX_MEGATRON_TIMEOUT_S", "600")
    try:
        timeout_s = float(timeout)
    except ValueError:
        timeout_s = 0.0
    if not 0 < timeout_s < float("inf"):
        raise ValueError(f"FLUX_MEGATRON_TIMEOUT_S={timeout!r}, expected seconds above 0")
    return Settings(
        strategy=strategy,
        strict=_switch(environment, "FLUX_MEGATRON_STRICT"),
        timeout_s=timeout_s,
        poison=_switch(environment, "FLUX_MEGATRON_POISON"),
    )


@lru_cache(maxsize=1)
def get() -> Settings:
    """The settings of this process."""
    return read(os.environ)


def reload() -> Settings:
    """Read the environment again: for tests and launchers that change it after the first read."""
    get.cache_clear()
    return get()
