"""Compiles the experts' activation and scaling for GPUs that are not there, as
`compile_norm` does.

python compile_activation.py FILE    writes JSON: name -> {"ptx", "shared_bytes", "spilled_bytes"}
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import compile_norm
import torch
from forked_work import write_results
from recorded_launches import launchers_of, memory

from flux_megatron.kernels import expert_activation as kernels
from flux_megatron.kernels import launch
from flux_megatron.kernels.triton_launch import Launcher

CAPACITY, SLOTS, N = 16384, 16, 14336  # of Mixtral 8x7B, 4096 tokens on each of 2 ranks
HIDDEN = 4096


def _launchers(dtype: torch.dtype) -> Iterator[tuple[str, Launcher]]:
    dy, x = memory(CAPACITY, N, dtype=dtype), memory(CAPACITY, 2 * N, dtype=dtype)
    rows, scale = memory(CAPACITY // 2, HIDDEN, dtype=dtype), memory(CAPACITY // 2)
    received = memory(SLOTS)
    calls: dict[str, Callable[[], object]] = {
        "scaled forward": lambda: kernels.scaled_forward(rows, scale),
        "scaled backward": lambda: kernels.scaled_backward(rows, rows, scale),
    }
    for one in ("silu", "gelu"):
        calls[f"{one} forward"] = partial(kernels.gated_forward, x, received, one)
        calls[f"{one} backward"] = partial(kernels.gated_backward, dy, x, received, one)
    for name, call in calls.items():
        yield name, *launchers_of(call)


def shipped() -> Iterator[tuple[str, Callable[[], dict]]]:
    for architecture, dtype in itertools.product((80, 90, 100), compile_norm.SHORT):
        for name, launcher in _launchers(dtype):
            make = partial(compile_norm.compiled, launcher, architecture, dtype, name)
            yield f"sm_{architecture} {name} {compile_norm.SHORT[dtype]}", make


if __name__ == "__main__":
    with mock.patch.object(launch, "sms", return_value=132):
        write_results(dict(shipped()), sys.argv[1])
