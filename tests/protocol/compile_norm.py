"""Compiles the norm's kernels for GPUs that are not there, in a process without the interpreter.

    python compile_norm.py FILE    writes JSON: name -> {"ptx", "shared_bytes", "spilled_bytes"}

As their launchers fix them, for rows of the widths of real models; spills are what the assembler
reports.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
import triton  # before our kernels, which would choose the interpreter on a machine without a GPU
from kept_code import compiled_or_kept
from recorded_launches import launchers_of, memory
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flux_megatron.kernels import launch, norm
from flux_megatron.kernels.triton_launch import Launcher

CASES = [(torch.bfloat16, N) for N in (100, 4096, 8192, 12288)] + [(torch.float32, 8192)]
SHORT = {torch.bfloat16: "bf16", torch.float32: "fp32"}
CTAS, ROWS = 132, 2048
_STATISTICS = ("mean", "rstd", "partials", "scale", "dscale")  # fp32 whatever x is
_COUNTS = ("M", "slots", "capacity")


def _launchers(N: int, dtype: torch.dtype, kind: str) -> Iterator[tuple[str, Launcher]]:
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


def compiled(launcher: Launcher, architecture: int, dtype: torch.dtype, kind: str) -> dict:
    kernel, tile = launcher._kernel, launcher._tile
    names = kernel.arg_names
    sizes = [n for n in names if n in ("x_stride", "ctas", "N")]
    values = dict(zip([p.name for p in kernel.params if p.is_constexpr],
                      launcher._fixed[len(sizes) :], strict=True))  # fmt: skip
    values |= dict.fromkeys({"mean", "bias"} & {*names} if kind == "rms_norm" else ())
    types = {**dict.fromkeys(_STATISTICS, "*fp32"), **dict.fromkeys([*_COUNTS, *sizes], "i32")}
    types["received"] = "*i32"
    signature = {n: "constexpr" if n in values else types.get(n, f"*{SHORT[dtype]}") for n in names}
    # as a launch finds it: addresses always, numbers where it is so and Triton may specialise them
    fixed = dict(zip(sizes, launcher._fixed, strict=False))
    aligned = [n for n in names if signature[n].startswith("*") or fixed.get(n, 1) % 16 == 0]
    source = ASTSource(
        fn=kernel, signature=signature, constexprs=values,
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )  # fmt: skip
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    target = GPUTarget("cuda", architecture, 32)
    return compiled_or_kept(source, target, options, lambda: _assembled(source, target, options))


def _assembled(source: ASTSource, target: GPUTarget, options: dict) -> dict:
    log = io.StringIO()
    with contextlib.redirect_stdout(log), mock.patch.object(
        triton.knobs.nvidia, "dump_ptxas_log", True
    ):  # fmt: skip
        result = triton.compile(source, target=target, options=options)
    spilled = re.search(r"(\d+) bytes spill stores", log.getvalue())
    assert spilled, log.getvalue()
    return {
        "ptx": result.asm["ptx"],
        "shared_bytes": result.metadata.shared,
        "spilled_bytes": int(spilled[1]),
    }


def shipped() -> Iterator[tuple[str, dict]]:
    kinds = ("layer_norm", "rms_norm")
    for architecture, (dtype, N), kind in itertools.product((80, 90), CASES, kinds):
        for name, launcher in _launchers(N, dtype, kind):
            result = compiled(launcher, architecture, dtype, kind)
            yield f"sm_{architecture} {kind} {name} {SHORT[dtype]} {N}", result


if __name__ == "__main__":
    with mock.patch.object(launch, "sms", return_value=CTAS):
        Path(sys.argv[1]).write_text(json.dumps(dict(shipped())))
