"""What two trainings are compared by, bit by bit."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a distributed checkpoint: weights and optimizer state."""
    reader = dcp.FileSystemReader(checkpoint)
    known = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in known.items()
        if hasattr(entry, "size")
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state
