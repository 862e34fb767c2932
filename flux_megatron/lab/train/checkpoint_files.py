"""Is a checkpoint whole? Told from its files, before any rank reads them. Torch only when asked."""

from __future__ import annotations

import zipfile
from pathlib import Path

from flux_megatron.lab.train.config import ConfigError
from flux_megatron.lab.train.run_folder import whole_names

COMMON = "common.pt"  # what all ranks read of a checkpoint


def check(checkpoint: Path) -> None:
    """`ConfigError` that names the file which is missing or torn, and the newest whole checkpoint
    of the run.
    """
    if torn := _torn(checkpoint):
        raise ConfigError(f"{torn}: the checkpoint is torn; {remedy(checkpoint)}")


def remedy(checkpoint: Path) -> str:
    """How to go on without this checkpoint: from the newest other one of its run that is whole."""
    folder = checkpoint.parent
    others = [name for name in reversed(whole_names(folder)) if name != checkpoint.name]
    newest = next((name for name in others if not _torn(folder / name)), None)
    if newest is None:
        return f"{folder} has no other whole one: train anew in another --out"
    return f"{newest} is the newest whole one: echo {newest} > {folder / 'latest'} goes on from it"


def _torn(checkpoint: Path) -> str:
    """Which file of it is missing, or shorter than the metadata say, or nothing."""
    from torch.distributed.checkpoint import FileSystemReader

    try:
        stored = FileSystemReader(checkpoint).read_metadata().storage_data.values()
    except Exception as error:  # a torn pickle raises any type
        return f"{checkpoint / '.metadata'} cannot be read ({' '.join(repr(error).split())})"
    sizes: dict[str, int] = {}
    for part in stored:
        sizes[part.relative_path] = max(sizes.get(part.relative_path, 0), part.offset + part.length)
    for name, size in sizes.items():
        file = checkpoint / name
        found = file.stat().st_size if file.is_file() else 0
        if found < size:
            return f"{file} has {found} bytes, {size} expected"
    common = checkpoint / COMMON
    if not zipfile.is_zipfile(common):
        return f"{common} is missing or torn, a file of torch.save expected"
    return ""
