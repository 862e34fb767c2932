"""Compiles the kernels of Embedding + All-to-All for GPUs that are not there, in a process without
the interpreter.

    python compile_embedding.py FILE    writes JSON: name -> {"ptx", "shared_bytes"}

As their launchers fix them, for 2 ranks and tables of D = 128 and of an odd D.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import torch
import triton  # noqa: F401, before our kernels: see `compile_source`
from compile_source import code_of, fixed_by, source_of, write_ptx
from recorded_launches import launchers_of, memory

from flux_megatron.kernels import launch
from flux_megatron.kernels.embedding import a2a as embedding_a2a
from flux_megatron.kernels.embedding import gradient as embedding_gradient
from flux_megatron.kernels.triton_launch import Launcher

SHORT = {torch.bfloat16: "bf16", torch.float32: "fp32"}
SAMPLES, SLICE, ROWS, TABLES = 4096, 512, 100_000, (32, 32)
_TYPES = {
    "timeout_ns": "i64", "nnz": "i64", "keys": "*i32", "scales": "*fp32", "sums": "*fp32",
    **dict.fromkeys(("indices", "offsets", "starts", "entries"), "*i64"),
    **dict.fromkeys(("received_pointers", "pad_pointers"), "*i64"),
    **dict.fromkeys(("first_tables", "pad", "counters", "work_counter", "status"), "*i32"),
}  # fmt: skip
_PAYLOAD = ("weight", "y", "received", "gradients", "dw")


def _launchers(D: int, mean: bool, dtype: torch.dtype) -> Iterator[tuple[str, Launcher]]:
    tile = embedding_a2a.tile_of(D, SAMPLES, "cuda")
    call, nothing = mock.MagicMock(epoch=1), memory(1)
    call.region.configure_mock(world_size=len(TABLES), rank=0)
    weight, bags = memory(TABLES[0], ROWS, D, dtype=dtype), SAMPLES * 64
    offsets = memory(TABLES[0] * SAMPLES * len(TABLES) + 1)
    forward = launchers_of(
        lambda: embedding_a2a.embedding_a2a(
            weight, nothing, offsets, call, first_tables=nothing, tables=TABLES,
            slice_samples=SLICE, mean=mean, tile=tile,
        )
    )  # fmt: skip
    keys, starts = memory(1024 * embedding_gradient.CHUNK), memory(ROWS * 32 + 1)
    backward = launchers_of(
        lambda: embedding_gradient.embedding_gradient(
            memory(bags, D, dtype=dtype), keys, nothing, starts, nothing if mean else None, call,
            dw=weight, samples=SAMPLES, slice_samples=SLICE, tile=tile,
        )
    )  # fmt: skip
    yield from zip(("forward", "chunk_sums", "row_sums"), forward + backward, strict=True)


def compiled(launcher: Launcher, architecture: int, dtype: torch.dtype) -> dict:
    tile = launcher._tile
    constants, aligned = fixed_by(launcher)
    types = {**_TYPES, **dict.fromkeys(_PAYLOAD, f"*{SHORT[dtype]}")}
    if launcher._kernel is embedding_a2a.embedding_a2a_kernel or not constants["SCALED"]:
        types["scales"] = "*i64"
    source = source_of(launcher._kernel, types, constants, aligned)
    return code_of(source, architecture, num_warps=tile.num_warps, num_stages=tile.num_stages)


def shipped() -> Iterator[tuple[str, Callable[[], dict]]]:
    """Each dtype, GPU, mode and kind of D once, not all of their combinations."""
    for architecture, D, mean, dtype in (
        (90, 128, False, torch.float32), (80, 128, False, torch.bfloat16),
        (90, 100, True, torch.bfloat16),
    ):  # fmt: skip
        for name, launcher in _launchers(D, mean, dtype):
            title = f"sm_{architecture} {name} {SHORT[dtype]} D={D}"
            yield title, partial(compiled, launcher, architecture, dtype)


if __name__ == "__main__":
    with mock.patch.object(launch, "sms", return_value=132):
        write_ptx(dict(shipped()))
