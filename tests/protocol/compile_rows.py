"""Compiles the kernels of rows, of norms and of the experts' activation and scaling, for GPUs that
are not there, in a process without the interpreter.

    python compile_rows.py FILE    writes JSON: name -> {"ptx", "shared_bytes", "spilled_bytes"}

For rows of the widths of real models; spills are what the assembler reports.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from functools import partial

import torch
from compile_source import assembled, codes_of, memory, write

from flux_megatron.kernels import norm
from flux_megatron.kernels.experts import activation, scaled
from flux_megatron.kernels.experts.activation import Gate
from flux_megatron.kernels.triton_launch import Code

CASES = [(torch.bfloat16, N) for N in (100, 4096, 8192, 12288)] + [(torch.float32, 8192)]
SHORT = {torch.bfloat16: "bf16", torch.float32: "fp32"}
ROWS = 2048
# of Mixtral 8x7B, 4096 tokens on each of 2 ranks
CAPACITY, SLOTS, FFN, HIDDEN = 16384, 16, 14336, 4096


def _of_norms(N: int, dtype: torch.dtype, kind: str) -> Iterator[tuple[str, Code]]:
    center = kind == "layer_norm"
    x, weight = memory(ROWS, N, dtype=dtype), memory(N, dtype=dtype)
    of_rows, bias = memory(ROWS, dtype=torch.float32), weight if center else None
    yield (
        "forward",
        *codes_of(
            lambda: norm.norm_forward(x, weight, bias, eps=1e-5, one_plus=False, center=center)
        ),
    )
    mean = of_rows if center else None
    backward, sum_partials = codes_of(
        lambda: norm.norm_backward(x, x, weight, mean, of_rows, one_plus=False, bias=center)
    )
    yield "backward", backward
    if N == 8192 and center:  # one stands for all: sizes are no constants to it
        yield "sum_partials", sum_partials


def _of_experts(dtype: torch.dtype) -> Iterator[tuple[str, Code]]:
    dy, x = memory(CAPACITY, FFN, dtype=dtype), memory(CAPACITY, 2 * FFN, dtype=dtype)
    rows = memory(CAPACITY // 2, HIDDEN, dtype=dtype)
    scale, received = memory(CAPACITY // 2, dtype=torch.float32), memory(SLOTS)
    wide, narrow = (
        scaled.Bias(memory(SLOTS // 2, columns, dtype=dtype), memory(SLOTS // 2))
        for columns in (2 * FFN, HIDDEN)
    )
    calls: dict[str, Callable[[], object]] = {}
    for biased, bias in (("", None), (" biased", narrow)):
        calls[f"scaled{biased} forward"] = partial(scaled.scaled_forward, rows, scale, bias)
        calls[f"scaled{biased} backward"] = partial(scaled.scaled_backward, rows, rows, scale, bias)
    gates = [(Gate("silu"), None), (Gate("gelu"), None), (Gate("quick_gelu", 7.0, 1.0), wide)]
    for gate, bias in gates:
        forward = partial(activation.gated_forward, x, received, gate, None, bias)
        calls[f"{gate.activation} forward"] = forward
        backward = partial(activation.gated_backward, dy, x, received, gate, None, bias)
        calls[f"{gate.activation} backward"] = backward
    for name, call in calls.items():
        yield name, *codes_of(call)


def compiled(code: Code, architecture: int) -> dict:
    result, log = assembled(code, architecture)
    spilled = re.search(r"(\d+) bytes spill stores", log)
    assert spilled, log
    return {
        "ptx": result.asm["ptx"],
        "shared_bytes": result.metadata.shared,
        "spilled_bytes": int(spilled[1]),
    }


def shipped() -> Iterator[tuple[str, tuple[Code, int]]]:
    kinds = ("layer_norm", "rms_norm")
    for architecture, (dtype, N), kind in itertools.product((80, 90), CASES, kinds):
        for name, code in _of_norms(N, dtype, kind):
            yield f"sm_{architecture} {kind} {name} {SHORT[dtype]} {N}", (code, architecture)
    for architecture, dtype in itertools.product((80, 90, 100), SHORT):
        for name, code in _of_experts(dtype):
            yield f"sm_{architecture} experts {name} {SHORT[dtype]}", (code, architecture)


if __name__ == "__main__":
    write(dict(shipped()), compiled)
