"""From a folder of text files to Megatron's GPTDataset: one document a file."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import (
    DType,
    IndexedDatasetBuilder,
    get_bin_path,
    get_idx_path,
)

from flux_megatron.lab.train import text
from flux_megatron.lab.train.config import TrainConfig
from flux_megatron.lab.train.text import ByteTokenizer


def gpt_dataset(config: TrainConfig, folder: Path) -> GPTDataset:
    """One shuffled epoch of samples, the same for any number of steps. Collective.

    The tokens are kept in `folder`, so that a resumed run reads what it has begun with.
    """
    prefix, indices = str(folder / "text"), folder / "indices"
    if dist.get_rank() == 0:
        shutil.rmtree(indices, ignore_errors=True)  # they may be half of what a killed run wrote
        if not Path(get_idx_path(prefix)).exists():  # it is written last
            _build(text.files(config), prefix)
    dist.barrier()
    dataset_config = GPTDatasetConfig(
        random_seed=config.train.seed, sequence_length=config.model.seq_length,
        blend=([prefix], None), split="1,0,0", path_to_cache=str(indices),
        tokenizer=ByteTokenizer(), reset_position_ids=False, reset_attention_mask=False,
        eod_mask_loss=False, create_attention_mask=False,
    )  # fmt: skip
    sizes: list[int | None] = [None, None, None]
    builder = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, dataset_config)
    return builder.build()[0]


def microbatches(
    dataset: GPTDataset, config: TrainConfig, consumed: int, device: torch.device
) -> Iterator[dict[str, torch.Tensor]]:
    """Endless microbatches of this data parallel rank, after `consumed` samples. Epochs repeat."""
    rank = parallel_state.get_data_parallel_rank()
    ranks = parallel_state.get_data_parallel_world_size()
    size = config.train.micro_batch
    while True:
        start = consumed + rank * size
        samples = [dataset[i % len(dataset)] for i in range(start, start + size)]
        yield {key: torch.stack([s[key] for s in samples]).to(device) for key in samples[0]}
        consumed += size * ranks


def _build(files: list[Path], prefix: str) -> None:
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    dtype = DType.optimal_dtype(ByteTokenizer.vocab_size)
    builder = IndexedDatasetBuilder(get_bin_path(prefix), dtype=dtype)
    for file in files:
        document = np.frombuffer(file.read_bytes(), dtype=np.uint8)
        tokens = np.append(document.astype(np.int32), ByteTokenizer.eod)
        builder.add_document(torch.from_numpy(tokens), [tokens.size])
    builder.finalize(get_idx_path(prefix))
