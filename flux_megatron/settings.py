"""Every FLUX_MEGATRON_* environment variable, read once and frozen.

| variable | meaning | default |
| --- | --- | --- |
| FLUX_MEGATRON_STRATEGY | `auto`, or the one strategy of every call, such as `fused` | auto |
| FLUX_MEGATRON_STRICT | 1: raise where a call would run without overlap | 0 |
| FLUX_MEGATRON_TIMEOUT_S | seconds of a wait for a rank, in races 60 at most | .8 of its group's |
| FLUX_MEGATRON_POISON | 1: fill symmetric buffers with NaN after use, to find stale reads | 0 |
| FLUX_MEGATRON_TUNE | `on`: the first call of a layer kind races plans; `auto`: on GPUs; `met`: \
there, for the numbers of tokens that come | auto |
| FLUX_MEGATRON_TUNE_SECONDS | seconds that these races may take in a run, compiling aside | 10 |
| FLUX_MEGATRON_BESIDE | 1: plans for calls beside other kernels; 0: alone; `auto`: below | auto |
| FLUX_MEGATRON_CACHE | folder of measured plans | ~/.cache/flux_megatron |
| FLUX_MEGATRON_NVTX | 1: NVTX ranges around every phase of a call | 0 |
| FLUX_MEGATRON_NATIVE | 1: C makes the driver calls; 0: Python does; below | 1 |
| FLUX_MEGATRON_ALLOW | what `--flux-allow` names, with spaces or commas between | |
| FLUX_MEGATRON_EXPERTS | 1: Megatron's experts are ours too | 0 |
| FLUX_MEGATRON_EXPERTS_ONCE | 1: a token travels once to a rank of its experts | 0 |
| FLUX_MEGATRON_EXPERT_TOKENS | the most tokens of a rank before its experts; not given: as many \
as it has, on all ranks | |
| FLUX_MEGATRON_FP8_WIRE | 1: FP8 GEMM+RS of `hopper` sends partial sums in e4m3 | 0 |
| FLUX_MEGATRON_ENABLE | 1: `flux_megatron.enable()` where Megatron begins | 0 |

`FLUX_MEGATRON_BESIDE=auto` is 1 where the Megatron integration finds communication of data or
pipeline parallelism that is overlapped, else 0. With `FLUX_MEGATRON_NATIVE=1` one call of C makes
all driver calls of a call, or one for each part of it between functions of torch and steps of the
caller (decision 0012).
"""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

# the first is the default
Strategy = Literal[
    "auto", "fused", "pipelined", "hopper", "low_latency", "signalled", "sequential"
]  # fmt: skip
STRATEGIES: tuple[str, ...] = get_args(Strategy)
TUNE = ("auto", "on", "met", "off")
BESIDE = ("auto", "0", "1")
PREFIX = "FLUX_MEGATRON_"

LONGEST_S = 1e9  # in ns kernels take it in 64 bits
CACHE = "~/.cache/flux_megatron"


def _folder(name: str, text: str) -> Path:
    """Not at import: every process that imports torch imports this file, also one without a home
    folder.
    """
    try:
        return Path(text or CACHE).expanduser()
    except RuntimeError:
        given = f"{name}={text!r}" if text else f"{name} is not given, by default {CACHE!r}"
        home = Path(text or CACHE).parts[0]
        raise ValueError(
            f"{given}, expected a folder: no home folder is known here for {home}"
        ) from None


@dataclass(frozen=True)
class Settings:
    strategy: str = "auto"
    strict: bool = False
    timeout_s: float | None = None  # None: as the group's timeout has it (`symm.groups`)
    poison: bool = False
    tune: str = "auto"
    tune_seconds: float = 10.0
    beside: str = "auto"
    cache: Path = field(default_factory=lambda: _folder("FLUX_MEGATRON_CACHE", ""))
    nvtx: bool = False
    native: bool = True
    allow: tuple[str, ...] = ()
    enable: bool = False
    fp8_wire: bool = False
    experts: bool = False
    experts_once: bool = False
    expert_tokens: int | None = None  # None: ranks have equally many


def _switch(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(f"{name}={text!r}, expected 0 or 1")
    return text == "1"


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= LONGEST_S:
        raise ValueError(f"{name}={text!r}, expected seconds above 0, at most {LONGEST_S:g}")
    return seconds


def _count(name: str, text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise ValueError(f"{name}={text!r}, expected a whole number above 0")
    return int(text)


def _one_of(values: tuple[str, ...]) -> Callable[[str, str], str]:
    def read(name: str, text: str) -> str:
        if text not in values:
            raise ValueError(f"{name}={text!r}, expected one of {', '.join(values)}")
        return text

    return read


def names_in(text: str) -> tuple[str, ...]:
    """Names with spaces or commas between."""
    return tuple(text.replace(",", " ").split())


_READ: dict[str, Callable[[str, str], Any]] = {
    "strategy": _one_of(STRATEGIES), "tune": _one_of(TUNE), "beside": _one_of(BESIDE),
    "timeout_s": _seconds, "tune_seconds": _seconds, "cache": _folder, "expert_tokens": _count,
    "allow": lambda _, text: names_in(text),
}  # fmt: skip


def read(environment: Mapping[str, str]) -> Settings:
    """Settings from a mapping of variables; `ValueError` names the variable that is wrong."""
    names = {field.name: PREFIX + field.name.upper() for field in fields(Settings)}
    given = {
        field: _READ.get(field, _switch)(name, environment[name])
        for field, name in names.items()
        if name in environment
    }
    return Settings(**given)


def enabled() -> bool:
    """Whether FLUX_MEGATRON_ENABLE asks for something. Every process that imports torch asks this,
    so nothing raises here: a wrong value is one for `read`, where our layers are enabled.
    """
    return os.environ.get("FLUX_MEGATRON_ENABLE", "0") != "0"


def unknown(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that look like ours and are none, each with what to say of it. LM is the
    checkout of `flux-megatron launch`.
    """
    known = ["LM", *(field.name.upper() for field in fields(Settings))]
    found = {}
    for name in sorted(environment):
        if name.startswith(PREFIX) and (end := name.removeprefix(PREFIX)) not in known:
            near = difflib.get_close_matches(end, known, n=1)
            meant = f"{PREFIX}{near[0]} expected?" if near else f"known ends: {', '.join(known)}"
            found[name] = f"{name} is no variable of flux_megatron, it is ignored; {meant}"
    return found


@lru_cache(maxsize=1)
def get() -> Settings:
    """The settings of this process. Rank 0 warns of variables that are none."""
    if os.environ.get("RANK", "0") == "0":
        _warn()
    return read(os.environ)


@lru_cache(maxsize=1)
def _warn() -> None:
    for line in unknown(os.environ).values():
        warnings.warn(line, stacklevel=4)


def reload() -> Settings:
    """Read the environment again: for tests and launchers that change it after the first read."""
    get.cache_clear()
    return get()
