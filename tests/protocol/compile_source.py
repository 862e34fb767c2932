"""What the scripts beside this one share: kernels as launches specialise them, and their code.

A script imports Triton before our kernels, which would choose the interpreter on a machine without
a GPU.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any
from unittest import mock

import triton
from forked_work import write_results
from kept_code import compiled_or_kept
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource

from flux_megatron.kernels.triton_launch import Launcher


def source_of(
    kernel: Any,
    types: Mapping[str, str],
    constants: dict[str, Any],
    aligned: Collection[str] = (),
    make: Callable[..., ASTSource] = ASTSource,
) -> ASTSource:
    """Parameters without a type are int32. Pointers and `aligned` numbers are multiples of 16, as a
    launch says: else nothing is pipelined.
    """
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    divisible = [n for n in names if signature[n].startswith("*") or n in aligned]
    return make(
        fn=kernel, signature=signature, constexprs=constants,
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in divisible},
    )  # fmt: skip


def fixed_by(launcher: Launcher) -> tuple[dict[str, Any], list[str]]:
    """The constants that it fixes, and those of its sizes that are multiples of 16."""
    kernel = launcher._kernel
    fixed = dict(zip(kernel.arg_names[-len(launcher._fixed) :], launcher._fixed, strict=True))
    constants = {p.name: fixed.pop(p.name) for p in kernel.params if p.is_constexpr}
    return constants, [name for name, size in fixed.items() if size % 16 == 0]


def layouts_of(instruction: str, ttgir: str) -> list[str]:
    """The layout of each piece of inline assembly that has the instruction, as Triton writes it:
    which elements a thread and a warp have.
    """
    called = (
        rf'elementwise_inline_asm "[^"]*{re.escape(instruction)}[^"]*".*-> tensor<[^,]*, (#\w+)>'
    )
    defined = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    return sorted(defined[name] for name in re.findall(called, ttgir))


def code_of(source: ASTSource, architecture: int, **options: int) -> dict:
    """The PTX, compiled or kept, and the shared memory that it needs."""
    target = GPUTarget("cuda", architecture, 32)

    def make() -> dict:
        result = triton.compile(source, target=target, options=options)
        return {
            "ptx": result.asm["ptx"],
            "shared_bytes": result.metadata.shared,
            "word_stores": layouts_of("st.relaxed.sys", result.asm["ttgir"]),
        }

    return compiled_or_kept(source, target, options, make)


def assembled(source: ASTSource, target: GPUTarget, options: dict) -> tuple[Any, str]:
    """What Triton makes of a source, and what the assembler says."""
    log = io.StringIO()
    with (
        contextlib.redirect_stdout(log),
        mock.patch.object(triton.knobs.nvidia, "dump_ptxas_log", True),
    ):
        result = triton.compile(source, target=target, options=options)
    return result, log.getvalue()


def write_ptx(work: Mapping[str, Callable[[], dict]]) -> None:
    """Results of `work`, to the file that the script is given. Nothing is assembled: the checks
    read PTX.
    """
    with mock.patch.object(CUDABackend, "make_cubin", return_value=b""):
        write_results(work, sys.argv[1])
