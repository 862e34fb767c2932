"""What a probe says of this machine, and what all of them ask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from flux_megatron.versions.library import Library

Status = Literal["ok", "note", "missing"]


@dataclass(frozen=True)
class Finding:
    """`missing` keeps a training run from starting, a `note` does not; `remedy` is what to do."""

    subject: str
    status: Status
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Wanted:
    """What a run on this machine is to have; `gpus` None: what there is, 0: the CPU."""

    gpus: int | None = None
    checkout: Path | None = None
    packages: tuple[str, ...] = ()


def untested(library: Library, version: str) -> Iterator[Finding]:
    if text := library.untested(version):
        subject = f"version of {library.distribution}"
        yield Finding(subject, "note", text, "run the tests before a long job")


def gpus_seen() -> int:
    if find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count()
