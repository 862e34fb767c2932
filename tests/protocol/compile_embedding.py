"""Compiles the kernels of Embedding + All-to-All for GPUs that are not there, in a process without
the interpreter.

    python compile_embedding.py FILE    writes JSON: name -> {"ptx", "shared_bytes"}

As their launchers fix them, for 2 ranks and tables of D = 128 and of an odd D.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import torch
import triton  # noqa: F401, before our kernels: see `compile_kernels`
from compile_kernels import code_of
from forked_work import write_results
from recorded_launches import launchers_of, memory
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource

from flux_megatron.kernels import embedding_a2a, embedding_gradient, launch
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
    kernel, tile = launcher._kernel, launcher._tile
    names = kernel.arg_names
    constants = [p.name for p in kernel.params if p.is_constexpr]
    values = dict(zip(constants, launcher._fixed[-len(constants) :], strict=True))
    sizes = launcher._fixed[: -len(constants)]
    size_names = names[-len(launcher._fixed) : -len(constants)]
    types = {**_TYPES, **dict.fromkeys(_PAYLOAD, f"*{SHORT[dtype]}")}
    if launcher._kernel is embedding_a2a.embedding_a2a_kernel or not values["SCALED"]:
        types["scales"] = "*i64"
    signature = {n: "constexpr" if n in values else types.get(n, "i32") for n in names}
    aligned = [n for n in names if signature[n].startswith("*")]
    aligned += [n for n, size in zip(size_names, sizes, strict=True) if size % 16 == 0]
    source = ASTSource(
        fn=kernel, signature=signature, constexprs=values,
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )  # fmt: skip
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return code_of(source, architecture, options)


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
    with (
        mock.patch.object(launch, "sms", return_value=132),
        mock.patch.object(CUDABackend, "make_cubin", return_value=b""),
    ):
        write_results(dict(shipped()), sys.argv[1])
