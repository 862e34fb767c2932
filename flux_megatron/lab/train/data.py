"""From a folder of text files to Megatron's GPTDataset: one document a file, built once, kept."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import (
    DType,
    IndexedDatasetBuilder,
    get_bin_path,
    get_idx_path,
)
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from flux_megatron.lab.train.config import ConfigError, DataConfig, TrainConfig
from flux_megatron.lab.train.rank_states import of_a_collective
from flux_megatron.lab.train.text_files import text_files, token_count
from flux_megatron.lab.train.tokenizer import ByteTokenizer

DTYPE = DType.optimal_dtype(ByteTokenizer().vocab_size)
# of an .idx: magic and version, dtype, two counts; then length, place and document of each file
_IDX_HEAD_BYTES, _IDX_FILE_BYTES = 9 + 8 + 1 + 8 + 8, 4 + 8 + 8


def indexed_dataset(data: DataConfig, cache: Path, console: Console) -> Path:
    """Prefix of the .bin/.idx pair of these files, built if `cache` lacks it. Call on one rank."""
    root, files = text_files(data)
    prefix = cache / f"bytes-{_fingerprint(root, files)}" / "text"
    if prefix.parent.is_dir():
        if not (torn := _torn(str(prefix), files)):
            return prefix
        console.print(f"{torn}: it is torn, and built anew", highlight=False, soft_wrap=True)
        _forget(prefix.parent)
    partial = prefix.parent.with_suffix(f".partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        _build(files, str(partial / "text"), console)
        _keep(partial, prefix.parent)
    except OSError as error:
        raise ConfigError(
            f"data.cache: {error.filename or partial} cannot be written ({error.strerror}): free "
            f"it, or give another folder by --set data.cache=FOLDER"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return prefix


def _torn(prefix: str, files: list[Path]) -> str:
    """Which file of the pair has another size than these texts give, or nothing."""
    expected = {
        get_bin_path(prefix): token_count(files) * np.dtype(DTYPE).itemsize,
        # and the end of the last document
        get_idx_path(prefix): _IDX_HEAD_BYTES + _IDX_FILE_BYTES * len(files) + 8,
    }
    for name, size in expected.items():
        found = os.path.getsize(name) if os.path.isfile(name) else 0
        if found != size:
            return f"{name} has {found} bytes, {size} expected"
    return ""


def _forget(folder: Path) -> None:
    """Take its name away at once: another run may have its files open."""
    aside = folder.with_suffix(f".torn-{os.getpid()}")
    folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _keep(partial: Path, final: Path) -> None:
    """Give a finished folder its name, unless another run was quicker: whole or absent."""
    try:
        partial.rename(final)
    except OSError:
        if not final.is_dir():
            raise
        shutil.rmtree(partial)


def gpt_dataset(config: TrainConfig, prefix: Path) -> GPTDataset:
    """One shuffled epoch of samples, the same for any number of steps. Collective.

    Its indices are kept beside the data; rank 0 makes them, whole or not at all.
    """
    kept = prefix.parent / f"indices-{config.model.seq_length}-{config.train.seed}"
    mine: list[Path] = [kept if kept.is_dir() else kept.with_suffix(f".partial-{os.getpid()}")]
    dist.broadcast_object_list(mine)
    dataset_config = GPTDatasetConfig(
        random_seed=config.train.seed,
        sequence_length=config.model.seq_length,
        blend=([str(prefix)], None),
        split="1,0,0",
        path_to_cache=str(mine[0]),
        tokenizer=ByteTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    sizes: list[int | None] = [None, None, None]
    builder = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, dataset_config)
    try:
        dataset = builder.build()[0]
    except Exception as error:  # numpy raises any type on a torn file
        if of_a_collective(error):
            raise
        cause = " ".join(str(error).split())
        raise ConfigError(
            f"{mine[0]} cannot be read or written ({type(error).__name__}: {cause}): remove it, it "
            "is built anew"
        ) from error
    dist.barrier()  # all ranks have opened them
    if dist.get_rank() == 0 and mine[0] != kept:
        _keep(mine[0], kept)
    if not len(dataset):
        raise ConfigError(f"data.path: less text than model.seq_length={config.model.seq_length}")
    return dataset


def microbatches(
    dataset: GPTDataset,
    config: TrainConfig,
    rank: int,
    ranks: int,
    consumed: int,
    device: torch.device,
) -> Iterator[dict[str, torch.Tensor]]:
    """Endless microbatches of data parallel rank `rank` of `ranks`, after `consumed` samples.

    Epochs repeat.
    """
    size = config.train.micro_batch
    while True:
        start = consumed + rank * size
        samples = [dataset[i % len(dataset)] for i in range(start, start + size)]
        yield {key: torch.stack([s[key] for s in samples]).to(device) for key in samples[0]}
        consumed += size * ranks


def _build(files: list[Path], prefix: str, console: Console) -> None:
    eod = ByteTokenizer().eod
    builder = IndexedDatasetBuilder(get_bin_path(prefix), dtype=DTYPE)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        for file in progress.track(files, description="text to tokens"):
            tokens = np.append(np.frombuffer(file.read_bytes(), dtype=np.uint8), np.uint16(eod))
            builder.add_document(torch.from_numpy(tokens.astype(np.int32)), [tokens.size])
    builder.finalize(get_idx_path(prefix))


def _fingerprint(root: Path, files: list[Path]) -> str:
    facts = [
        (f.relative_to(root).as_posix(), f.stat().st_size, f.stat().st_mtime_ns) for f in files
    ]
    text = json.dumps([ByteTokenizer().unique_identifiers, str(root.resolve()), facts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
