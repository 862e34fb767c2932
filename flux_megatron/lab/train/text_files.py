"""Which files a run reads, checked before any rank starts. No torch."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from flux_megatron.lab.train.config import ConfigError, DataConfig, TrainConfig

SNIFF_BYTES = 8192  # a NUL byte this early means that a file is no text
NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}


def text_files(data: DataConfig) -> tuple[Path, list[Path]]:
    """(root, files) in an order that depends on their names only.

    `ConfigError` where there is nothing to read, or a file cannot be read.
    """
    root = data.path or Path(sysconfig.get_path("stdlib"))
    if not root.is_dir():
        raise ConfigError(f"data.path: {root} is not a folder: --data takes one of text files")
    try:
        files = [
            file
            for file in root.rglob(data.pattern if data.path else "*.py")
            if file.is_file() and not _hidden(file.relative_to(root), stdlib=data.path is None)
        ]
        files = [file for file in files if _is_text(file)]
    except (ValueError, NotImplementedError) as error:  # of rglob
        raise ConfigError(
            f"data.pattern: {data.pattern!r} given, a pattern such as '*.txt' expected ({error})"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"data.path: {error.filename} cannot be read ({error.strerror})"
        ) from None
    if not files:
        raise ConfigError(f"data.path: no text file in {root} matches {data.pattern!r}")
    return root, sorted(files, key=lambda file: file.relative_to(root).as_posix())


def check(config: TrainConfig) -> None:
    """`ConfigError` where the text cannot be read, or is shorter than one sample."""
    root, files = text_files(config.data)
    found, needed = token_count(files), config.model.seq_length + 1
    if found < needed:
        raise ConfigError(
            f"data.path: {found} tokens in {root}, {needed} or more expected: "
            f"less text than model.seq_length={config.model.seq_length}"
        )


def token_count(files: list[Path]) -> int:
    """A token a byte, and one at the end of each file."""
    return sum(file.stat().st_size + 1 for file in files)


def _hidden(relative: Path, stdlib: bool) -> bool:
    skipped = NOT_STDLIB if stdlib else set()
    return any(part.startswith(".") or part in skipped for part in relative.parts)


def _is_text(file: Path) -> bool:
    with file.open("rb") as stream:
        return b"\0" not in stream.read(SNIFF_BYTES)
