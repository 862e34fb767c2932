"""Compiles the experts' activation and scaling for GPUs that are not there, as
`compile_norm` does.

python compile_activation.py FILE    writes JSON: name -> {"ptx", "shared_bytes", "spilled_bytes"}
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import compile_norm
import torch

from flux_megatron.kernels import expert_activation as kernels
from flux_megatron.kernels import launch
from flux_megatron.kernels.triton_launch import Launcher

CAPACITY, SLOTS, N = 16384, 16, 14336  # of Mixtral 8x7B, 4096 tokens on each of 2 ranks
HIDDEN = 4096


def _launchers(dtype: torch.dtype) -> Iterator[tuple[str, Launcher]]:
    code = (dtype, torch.device("cuda", 0))
    gated = {"forward": kernels.gated_forward_kernel, "backward": kernels.gated_backward_kernel}
    for (way, kernel), activation in itertools.product(gated.items(), kernels.ACTIVATIONS):
        yield f"{activation} {way}", kernels._gated(kernel, CAPACITY, SLOTS, N, activation, code)
    scaled = {"forward": kernels.scaled_forward_kernel, "backward": kernels.scaled_backward_kernel}
    for way, kernel in scaled.items():
        yield f"scaled {way}", kernels._scaled(kernel, CAPACITY // 2, HIDDEN, code)


def shipped() -> Iterator[tuple[str, dict]]:
    for architecture, dtype in itertools.product((80, 90, 100), compile_norm.SHORT):
        for name, launcher in _launchers(dtype):
            result = compile_norm.compiled(launcher, architecture, dtype, name)
            yield f"sm_{architecture} {name} {compile_norm.SHORT[dtype]}", result


if __name__ == "__main__":
    with mock.patch.object(launch, "sms", return_value=132):
        Path(sys.argv[1]).write_text(json.dumps(dict(shipped())))
