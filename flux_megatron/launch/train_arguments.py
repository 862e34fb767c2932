"""An arm of an experiment as a configuration of `flux-megatron train`.

What that program cannot do has been refused when the experiment was read (`rules`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from flux_megatron.launch.megatron_arguments import POSITION
from flux_megatron.launch.workload import Workload

SAME = ("steps", "micro_batch", "global_batch", "lr", "seed", "dtype")  # of `training`
LAYERS = {"megatron": "stock", "flux": "flux"}


def render(workload: Workload, *, data: Path | None = None, save_interval: int = 0) -> str:
    """The YAML file of the arm. `data`: a folder of text; by default Python's standard library."""
    model, parallel, training = workload.model, workload.parallel, workload.training
    config: dict[str, Any] = {
        "model": {
            "num_layers": model.layers,
            "hidden": model.hidden,
            "heads": model.heads,
            "ffn": model.ffn,
            "seq_length": model.seq_length,
            "normalization": model.norm,
            "swiglu": model.swiglu,
            "bias": model.linear_bias,
            "tied_embeddings": model.tied_embeddings,
            "position_embedding": POSITION[model.position],
        },
        "parallel": {
            "device": "cpu" if workload.cluster.gpu == "cpu" else "cuda",
            **{name: getattr(parallel, name) for name in ("tp", "sequence_parallel", "world_size")},
        },
        "data": {"path": str(data) if data else None},
        "train": {
            **{name: getattr(training, name) for name in SAME},
            "save_every": save_interval or None,
            "log_every": 1,
        },
        "layers": LAYERS[workload.arm],
        "strategy": "auto",
    }
    return yaml.safe_dump(config, sort_keys=False)
