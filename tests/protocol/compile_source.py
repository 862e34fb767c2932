"""What the scripts beside this one share: the code of launches, as their launchers note it, and
what Triton makes of it for GPUs that are not there.

It comes before our kernels in every script: they would choose the interpreter on a machine without
a GPU, unless Triton is imported.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from forked_work import write_results
from kept_code import compiled_or_kept
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver

from flux_megatron.kernels import launch
from flux_megatron.kernels.compiled_ahead import NoGpu
from flux_megatron.kernels.triton_launch import Code, noted
from flux_megatron.overlap import codes, registry
from flux_megatron.problem import Plan, Problem
from flux_megatron.symm.channel import Call

launch.sms = lambda device: 132  # of an H100 or H200
Compiled = Mapping[str, tuple[Code, int]]  # by name, each with the architecture of its GPU


def memory(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def codes_of(call: Callable[[], object]) -> list[Code]:
    """Of what a call launches."""
    with noted() as codes:
        call()
    return codes


def codes_of_plan(
    problem: Problem, plan: Plan, *, borrows: bool = False, biased: bool = False
) -> Iterator[Code]:
    """Of what a call of this plan launches, on a GPU."""
    world_size, device = problem.world_size, torch.device("cuda")
    space: Any = SimpleNamespace(
        rank=0, world_size=world_size, timeout_ns=1, device=device, mailboxes=False
    )
    build = registry.strategy(problem, plan.strategy).BUILDERS[problem.pattern]
    return codes.launched(build, problem, plan, space, borrows, biased)


def call_of(world_size: int) -> Call:
    """An open call, as far as kernels' functions on the host ask it."""
    words, pointers = memory(1), memory(world_size, dtype=torch.int64)
    region: Any = SimpleNamespace(
        world_size=world_size, rank=0, pointers=pointers, own_pad=words, pads=[words] * world_size,
        pad_pointers=pointers, entries=words,
        view=lambda rank, shape, dtype: memory(*shape, dtype=dtype),
    )  # fmt: skip
    channel: Any = SimpleNamespace(timeout_ns=1, tile_counters=words, work_counter=words)
    return Call(1, words, region, channel)


class Pretended(NoGpu):
    """A GPU. Triton keeps what it compiles by the number of the device."""

    def get_current_device(self) -> int:
        return self._target.arch


def compiled(code: Code, architecture: int) -> Any:
    """By Triton."""
    driver.set_active(Pretended(GPUTarget("cuda", architecture, 32)))
    return code.compiled()


def assembled(code: Code, architecture: int) -> tuple[Any, str]:
    """The same, and what the assembler says."""
    log = io.StringIO()
    with (
        contextlib.redirect_stdout(log),
        mock.patch.object(triton.knobs.nvidia, "dump_ptxas_log", True),
    ):
        result = compiled(code, architecture)
    return result, log.getvalue()


def layouts_of(instruction: str, ttgir: str) -> list[str]:
    """The layout of each piece of inline assembly that has the instruction, as Triton writes it:
    which elements a thread and a warp have.
    """
    called = (
        rf'elementwise_inline_asm "[^"]*{re.escape(instruction)}[^"]*".*-> tensor<[^,]*, (#\w+)>'
    )
    defined = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    return sorted(defined[name] for name in re.findall(called, ttgir))


def ptx_of(code: Code, architecture: int) -> dict:
    result = compiled(code, architecture)
    return {
        "ptx": result.asm["ptx"],
        "shared_bytes": result.metadata.shared,
        "word_stores": layouts_of("st.relaxed.sys", result.asm["ttgir"]),
    }


def write(found: Compiled, make: Callable[[Code, int], dict]) -> None:
    """What `make` gives of each, or what is kept of it, to the file that the script is given."""
    work = {
        name: partial(compiled_or_kept, code, architecture, partial(make, code, architecture))
        for name, (code, architecture) in found.items()
    }
    write_results(work, sys.argv[1])


def write_ptx(found: Compiled) -> None:
    """Nothing is assembled: the checks read PTX."""
    with mock.patch.object(CUDABackend, "make_cubin", return_value=b""):
        write(found, ptx_of)
