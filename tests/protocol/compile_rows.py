"""Compiles the kernels of rows, of norms and of the experts' activation and scaling, for GPUs that
are not there, in a process without the interpreter.

    python compile_rows.py FILE    writes JSON: name -> {"ptx", "shared_bytes", "spilled_bytes"}

As their launchers fix them, for rows of the widths of real models; spills are what the assembler
reports.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import torch
import triton  # noqa: F401, before our kernels: see `compile_source`
from compile_source import assembled, fixed_by, source_of
from forked_work import write_results
from kept_code import compiled_or_kept
from recorded_launches import launchers_of, memory
from triton.backends.compiler import GPUTarget

from flux_megatron.kernels import launch, norm
from flux_megatron.kernels.experts import activation as expert_activation
from flux_megatron.kernels.triton_launch import Launcher

CASES = [(torch.bfloat16, N) for N in (100, 4096, 8192, 12288)] + [(torch.float32, 8192)]
SHORT = {torch.bfloat16: "bf16", torch.float32: "fp32"}
CTAS, ROWS = 132, 2048
# of Mixtral 8x7B, 4096 tokens on each of 2 ranks
CAPACITY, SLOTS, FFN, HIDDEN = 16384, 16, 14336, 4096
_STATISTICS = ("mean", "rstd", "partials", "scale", "dscale")  # fp32 whatever x is
_NUMBERS = ("M", "slots", "capacity", "x_stride", "ctas", "N")


def _of_norms(N: int, dtype: torch.dtype, kind: str) -> Iterator[tuple[str, Launcher]]:
    center = kind == "layer_norm"
    x, weight, rstd = memory(ROWS, N, dtype=dtype), memory(N, dtype=dtype), memory(ROWS)
    kind_of = {"one_plus": False}
    (forward,) = launchers_of(
        lambda: norm.norm_forward(
            x, weight, weight if center else None, eps=1e-5, center=center, **kind_of
        )
    )
    backward, sum_partials = launchers_of(
        lambda: norm.norm_backward(
            x, x, weight, rstd if center else None, rstd, bias=center, **kind_of
        )
    )
    yield from (("forward", forward), ("backward", backward))
    if N == 8192 and center:  # one stands for all: sizes are no constants to it
        yield "sum_partials", sum_partials


def _of_experts(dtype: torch.dtype) -> Iterator[tuple[str, Launcher]]:
    dy, x = memory(CAPACITY, FFN, dtype=dtype), memory(CAPACITY, 2 * FFN, dtype=dtype)
    rows, scale = memory(CAPACITY // 2, HIDDEN, dtype=dtype), memory(CAPACITY // 2)
    received, kernels = memory(SLOTS), expert_activation
    calls: dict[str, Callable[[], object]] = {
        "scaled forward": lambda: kernels.scaled_forward(rows, scale),
        "scaled backward": lambda: kernels.scaled_backward(rows, rows, scale),
    }
    for one in ("silu", "gelu"):
        calls[f"{one} forward"] = partial(kernels.gated_forward, x, received, one)
        calls[f"{one} backward"] = partial(kernels.gated_backward, dy, x, received, one)
    for name, call in calls.items():
        yield name, *launchers_of(call)


def compiled(launcher: Launcher, architecture: int, dtype: torch.dtype, kind: str) -> dict:
    kernel, tile = launcher._kernel, launcher._tile
    constants, aligned = fixed_by(launcher)
    names = {*kernel.arg_names}
    constants |= dict.fromkeys({"mean", "bias"} & names if kind == "rms_norm" else ())
    types = {
        **dict.fromkeys(names - {*_NUMBERS}, f"*{SHORT[dtype]}"),
        **dict.fromkeys(_STATISTICS, "*fp32"), "received": "*i32",
    }  # fmt: skip
    source = source_of(kernel, types, constants, aligned)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    target = GPUTarget("cuda", architecture, 32)

    def make() -> dict:
        result, log = assembled(source, target, options)
        spilled = re.search(r"(\d+) bytes spill stores", log)
        assert spilled, log
        return {
            "ptx": result.asm["ptx"],
            "shared_bytes": result.metadata.shared,
            "spilled_bytes": int(spilled[1]),
        }

    return compiled_or_kept(source, target, options, make)


def shipped() -> Iterator[tuple[str, Callable[[], dict]]]:
    kinds = ("layer_norm", "rms_norm")
    for architecture, (dtype, N), kind in itertools.product((80, 90), CASES, kinds):
        for name, launcher in _of_norms(N, dtype, kind):
            title = f"sm_{architecture} {kind} {name} {SHORT[dtype]} {N}"
            yield title, partial(compiled, launcher, architecture, dtype, kind)
    for architecture, dtype in itertools.product((80, 90, 100), SHORT):
        for name, launcher in _of_experts(dtype):
            title = f"sm_{architecture} experts {name} {SHORT[dtype]}"
            yield title, partial(compiled, launcher, architecture, dtype, name)


if __name__ == "__main__":
    with mock.patch.object(launch, "sms", return_value=CTAS):
        write_results(dict(shipped()), sys.argv[1])
