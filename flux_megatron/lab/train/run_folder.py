"""The folder of one run. No torch; the parent and rank 0 use it.

config.json  metrics.jsonl  summary.json  loss.png  checkpoints/  lock
logs/rank_N.log  logs/rank_N.error
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from flux_megatron import config_files
from flux_megatron.errors import RunFailed
from flux_megatron.lab.train.config import ConfigError, TrainConfig

LOCK = "lock"
# what a run leaves that has done no step: its folder is as good as empty
OF_A_START = {LOCK, "logs", "cache"}
CONFIG, METRICS = "config.json", "metrics.jsonl"
OF_A_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
STEP = re.compile(r"step_\d+")
MAY_CHANGE = (
    "train.steps", "train.save_every", "train.log_every", "data.cache",
    "parallel.tp", "parallel.world_size",
)  # fmt: skip


class RunFolderError(RunFailed):
    """A run's folder could not be written. Look at the disk; then resume."""


def refuse_used(out: Path, resume: bool) -> None:
    """`ConfigError` if `out` holds anything and this is not a resumption.

    No run is ever overwritten.
    """
    try:
        held = {*os.listdir(out)}
    except FileNotFoundError:
        held = set()
    except OSError as error:
        raise unwritable(out, error) from None
    if resume and not (out / CONFIG).is_file():
        raise ConfigError(
            f"--resume: {out} holds no run (no {CONFIG}): give the --out of one, or leave --resume "
            "out to start one there"
        )
    if not resume and not held <= OF_A_START:
        raise ConfigError(f"{out} is not empty: give another --out, or --resume to continue it")


@contextmanager
def claimed(config: TrainConfig, out: Path, resume: bool) -> Iterator[None]:
    """A context in which `out` is this run's alone; its configuration is recorded.

    `ConfigError` while another run is in it, or where nothing can be written. The kernel drops the
    claim of a process that ends. A run that fails before its first step leaves the folder free.
    """
    refuse_used(out, resume)
    with _lock(out) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{out}: another run is writing there; give another --out") from None
        refuse_used(out, resume)  # again: another run may have come and gone
        _record(config, out)
        try:
            yield
        except Exception:
            if not resume and not (out / METRICS).exists():
                (out / CONFIG).unlink(missing_ok=True)
            raise


def _lock(out: Path) -> IO[str]:
    try:
        out.mkdir(parents=True, exist_ok=True)
        return (out / LOCK).open("a")
    except OSError as error:
        raise unwritable(out, error) from None


def unwritable(out: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"--out {out}: {error.filename or out} cannot be written ({error.strerror}): a folder "
        "with room expected, give another --out"
    )


def _record(config: TrainConfig, out: Path) -> None:
    """Write down what is run, which a resumption must match."""
    file, new = out / CONFIG, config.model_dump(mode="json")
    old = recorded_config(out) if file.exists() else config
    if changed := config_files.differences(old.model_dump(mode="json"), new, but=MAY_CHANGE):
        raise ConfigError(f"{out} cannot be resumed with other settings: {changed}")
    if old.padded_vocab != config.padded_vocab:
        raise ConfigError(
            f"parallel.tp={config.parallel.tp} given: a padded vocabulary of {config.padded_vocab} "
            f"rows, {old.padded_vocab} expected for the same losses, as with "
            f"parallel.tp={old.parallel.tp}"
        )
    try:
        write_json(file, new)
    except OSError as error:
        raise unwritable(out, error) from None


def recorded_config(out: Path) -> TrainConfig:
    """What a run was started with; `ConfigError` where that cannot be read."""
    file = out / CONFIG
    try:
        return TrainConfig.model_validate_json(file.read_bytes())
    except (OSError, ValueError) as error:
        said = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise ConfigError(
            f"{file} cannot be read ({said}): bring back the one that the run has written"
        ) from None


def latest(out: Path) -> Path | None:
    """The newest whole checkpoint of a run, or None; `ConfigError` where `latest` names none.

    Without `latest` it is the newest: a run may end between the two.
    """
    folder = out / "checkpoints"
    pointer, whole = folder / "latest", whole_names(folder)
    if not pointer.exists():
        return folder / whole[-1] if whole else None
    try:
        name = pointer.read_text(errors="replace").strip()
    except OSError as error:
        raise ConfigError(f"{pointer} cannot be read ({error.strerror})") from None
    if name not in whole:
        mend = f"; echo {whole[-1]} > {pointer} goes on from the newest" if whole else ""
        raise ConfigError(f"{pointer} says {name!r}, expected one of {whole}{mend}")
    return folder / name


def whole_names(folder: Path) -> list[str]:
    """The names of the checkpoints in `folder`, oldest first."""
    found = [path.name for path in folder.glob("step_*") if STEP.fullmatch(path.name)]
    return sorted(found, key=lambda name: int(name.removeprefix("step_")))


def free(out: Path) -> str:
    return f"{shutil.disk_usage(out).free} bytes are free there"


@contextmanager
def naming_a_full_disk(out: Path) -> Iterator[None]:
    """`RunFolderError` in place of what writing to a full or failing disk raises."""
    try:
        yield
    except OSError as error:
        if error.errno not in OF_A_DISK:
            raise
        raise RunFolderError(
            f"{error.filename or out} could not be written ({error.strerror}), {free(out)}: "
            "free some, then continue by --resume"
        ) from error


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Atomically: a reader sees the old file or the new one."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(partial, file)


def read_json(file: Path) -> dict[str, Any]:
    """`ConfigError` where the file is missing or torn."""
    try:
        content: dict[str, Any] = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read ({error})") from None
    return content


def metrics(out: Path) -> list[dict[str, Any]]:
    """One row per step. A last line without its end is what a killed run left, and is dropped."""
    file = out / METRICS
    if not file.exists():
        return []
    try:
        *lines, _ = file.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror})") from None
    return [_row(file, number, line) for number, line in enumerate(lines, 1)]


def _row(file: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
        int(row["step"])
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{file}: line {number} is no row ({error!r}): remove it") from None
    return dict(row)


def keep_metrics(out: Path, step: int) -> None:
    """Forget the rows after `step`: a resumed run writes them again."""
    rows = [row for row in metrics(out) if row["step"] <= step]
    partial = out / "metrics.partial"
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.replace(partial, out / METRICS)


def append_metrics(out: Path, row: dict[str, Any]) -> None:
    with (out / METRICS).open("a") as stream:
        stream.write(json.dumps(row) + "\n")
