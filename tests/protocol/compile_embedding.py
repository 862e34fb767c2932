"""Compiles the kernels of Embedding + All-to-All for GPUs that are not there, in a process without
the interpreter.

    python compile_embedding.py FILE    writes JSON: name -> {"ptx", "shared_bytes"}

For 2 ranks and tables of D = 128 and of an odd D.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from compile_source import call_of, codes_of, memory, write_ptx

from flux_megatron.kernels.embedding import a2a as embedding_a2a
from flux_megatron.kernels.embedding import gradient as embedding_gradient
from flux_megatron.kernels.triton_launch import Code

SHORT = {torch.bfloat16: "bf16", torch.float32: "fp32"}
SAMPLES, SLICE, ROWS, TABLES = 4096, 512, 100_000, (32, 32)


def _codes(D: int, mean: bool, dtype: torch.dtype) -> Iterator[tuple[str, Code]]:
    tile = embedding_a2a.tile_of(D, SAMPLES, "cuda")
    call, first_tables = call_of(len(TABLES)), memory(len(TABLES) + 1)
    weight, bags = memory(TABLES[0], ROWS, D, dtype=dtype), SAMPLES * 64
    numbers = memory(1024 * embedding_gradient.CHUNK, dtype=torch.int64)
    offsets = memory(TABLES[0] * SAMPLES * len(TABLES) + 1, dtype=torch.int64)
    forward = codes_of(
        lambda: embedding_a2a.embedding_a2a(
            weight, numbers, offsets, call, first_tables=first_tables, tables=TABLES,
            slice_samples=SLICE, mean=mean, tile=tile,
        )
    )  # fmt: skip
    keys, scales = numbers.to(torch.int32), numbers.to(torch.float32)
    starts = memory(ROWS * 32 + 1, dtype=torch.int64)
    backward = codes_of(
        lambda: embedding_gradient.embedding_gradient(
            memory(bags, D, dtype=dtype), keys, numbers, starts, scales if mean else None, call,
            dw=weight, samples=SAMPLES, slice_samples=SLICE, tile=tile,
        )
    )  # fmt: skip
    yield from zip(("forward", "chunk_sums", "row_sums"), forward + backward, strict=True)


def shipped() -> Iterator[tuple[str, tuple[Code, int]]]:
    """Each dtype, GPU, mode and kind of D once, not all of their combinations."""
    for architecture, D, mean, dtype in (
        (90, 128, False, torch.float32), (80, 128, False, torch.bfloat16),
        (90, 100, True, torch.bfloat16),
    ):  # fmt: skip
        for name, code in _codes(D, mean, dtype):
            yield f"sm_{architecture} {name} {SHORT[dtype]} D={D}", (code, architecture)


if __name__ == "__main__":
    write_ptx(dict(shipped()))
