"""The folder of one run. No torch; the parent and rank 0 use it.

config.json  metrics.jsonl  summary.json  loss.png  checkpoints/  lock
logs/rank_N.log  logs/rank_N.error
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flux_megatron import config_files
from flux_megatron.train.config import ConfigError, TrainConfig

LOCK = "lock"
MAY_CHANGE = ("train.steps", "train.save_every", "train.log_every", "data.cache")


def refuse_used(out: Path, resume: bool) -> None:
    """`ConfigError` if `out` holds anything and this is not a resumption.

    No run is ever overwritten.
    """
    if not resume and out.exists() and not (out.is_dir() and {*os.listdir(out)} <= {LOCK}):
        raise ConfigError(f"{out} is not empty: give another --out, or --resume to continue it")


@contextmanager
def claimed(config: TrainConfig, out: Path, resume: bool) -> Iterator[None]:
    """A context in which `out` is this run's alone; its configuration is recorded.

    `ConfigError` while another run is in it. The kernel drops the claim of a process that ends.
    """
    refuse_used(out, resume)
    out.mkdir(parents=True, exist_ok=True)
    with (out / LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{out}: another run is writing there; give another --out") from None
        refuse_used(out, resume)  # again: another run may have come and gone
        _record(config, out)
        yield


def _record(config: TrainConfig, out: Path) -> None:
    """Write down what is run, which a resumption must match."""
    file, new = out / "config.json", config.model_dump(mode="json")
    old = read_json(file) if file.exists() else new
    if changed := config_files.differences(old, new, but=MAY_CHANGE):
        raise ConfigError(f"{out} cannot be resumed with other settings: {changed}")
    write_json(file, new)


def recorded_config(out: Path) -> TrainConfig:
    return TrainConfig.model_validate_json((out / "config.json").read_text())


def latest(out: Path) -> Path | None:
    """The newest whole checkpoint of a run, or None; `ConfigError` where `latest` names none."""
    pointer = out / "checkpoints" / "latest"
    if not pointer.exists():
        return None
    name = pointer.read_text(errors="replace").strip()
    whole = whole_checkpoints(out)
    if name not in whole:
        raise ConfigError(f"{pointer} says {name!r}, expected one of {whole}: write one into it")
    return pointer.parent / name


def whole_checkpoints(out: Path) -> list[str]:
    """The names of the checkpoints, oldest first."""
    found = [path.name for path in (out / "checkpoints").glob("step_*") if path.suffix == ""]
    return sorted(found, key=lambda name: int(name.removeprefix("step_")))


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Atomically: a reader sees the old file or the new one."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(partial, file)


def read_json(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def metrics(out: Path) -> list[dict[str, Any]]:
    """One row per step. A last line without its end is what a killed run left, and is dropped."""
    file = out / "metrics.jsonl"
    if not file.exists():
        return []
    *lines, _ = file.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:  # noqa: PERF203, the number of the line
            raise ConfigError(f"{file}: line {number} is no row ({error}): remove it") from None
    return rows


def keep_metrics(out: Path, step: int) -> None:
    """Forget the rows after `step`: a resumed run writes them again."""
    rows = [row for row in metrics(out) if row["step"] <= step]
    partial = out / "metrics.partial"
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.replace(partial, out / "metrics.jsonl")


def append_metrics(out: Path, row: dict[str, Any]) -> None:
    with (out / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps(row) + "\n")
