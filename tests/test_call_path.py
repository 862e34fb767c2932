"""The path of one call is at most five files: what a reader opens to follow it to a kernel.

A path is a chain of files, each entered from the one before: the stack of a call, from the public
operation down to whatever it enters, in every room. Nothing is left out but what Triton runs, which
is the kernel itself: interpreted here, compiled for GPUs. Only a call that has been made before
counts, without options that look for bugs: the first one also chooses a plan, takes memory and
compiles.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import FrameType, SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import ON_HOPPER, forget_programs, plan_of
from ranks import DEVICE, on_device, run_ranks

import flux_megatron
from flux_megatron.overlap import calls, collectives
from flux_megatron.problem import Tile
from flux_megatron.symm import copies, cpu_backend
from flux_megatron.symm.workspaces import workspaces

PACKAGE = f"{Path(flux_megatron.__file__).parent}/"
TRITON = "/triton/runtime/"
LONGEST = 5
PLAIN = {"FLUX_MEGATRON_POISON": "0"}
OPERATIONS = {
    "ag_gemm": flux_megatron.all_gather_gemm,
    "gemm_rs": flux_megatron.gemm_reduce_scatter,
    "gemm_ar": flux_megatron.gemm_all_reduce,
}
# the files of kernels that a call launches
KERNELS = {
    **{("sequential", pattern): set() for pattern in OPERATIONS},
    ("pipelined", "ag_gemm"): {"portable/wait_sources"},
    ("pipelined", "gemm_rs"): {"portable/reduce_received"},
    ("pipelined", "gemm_ar"): {"portable/reduce_received", "portable/wait_sources"},
    ("low_latency", "ag_gemm"): {"few_rows/ag_gemv"},
    **{("low_latency", pattern): {"few_rows/gemv_ar"} for pattern in ("gemm_rs", "gemm_ar")},
    **{("signalled", pattern): {"portable/signalled_gemm"} for pattern in ("gemm_rs", "gemm_ar")},
    ("fused", "ag_gemm"): {"portable/ag_gemm"},
    ("fused", "gemm_rs"): {"portable/gemm_rs", "portable/reduce_received"},
    ("fused", "gemm_ar"): {"portable/gemm_rs", "portable/reduce_received", "portable/wait_sources"},
}
if ON_HOPPER:
    KERNELS["hopper", "ag_gemm"] = {"hopper/ag_gemm"}
    KERNELS["hopper", "gemm_rs"] = {"hopper/gemm_rs", "hopper/gemm"}  # when a tile is made
    KERNELS["hopper", "gemm_ar"] = {"hopper/gemm_rs", "hopper/gemm"}
# These hand no operand on: how any kernel is launched, what describes, divides, counts, names and
# records, and whether a tile fits an SM.
# `symm/` is entered through the workspace and the copy engine, whose promises docs/memory_model.md
# has.
BESIDE = {
    "kernels/launch", "kernels/triton_launch", "kernels/triton_private", "kernels/sizes",
    "kernels/descriptors", "kernels/hopper/config", "kernels/hopper/split_tiles",
    "kernels/few_rows/words", "kernels/shared_memory",
    "overlap/operands", "overlap/phase", "overlap/report", "problem", "scaling",
}  # fmt: skip


def chain_of(frame: FrameType | None) -> tuple[str, ...]:
    """The files of the package on the stack, from the first; none within what Triton runs."""
    files: list[str] = []
    while frame is not None:
        name = frame.f_code.co_filename
        if TRITON in name:
            return ()
        file = name.removeprefix(PACKAGE).removesuffix(".py")
        if name.startswith(PACKAGE) and file not in files[-1:]:
            files.append(file)
        frame = frame.f_back
    return (*reversed(files),)


def chains(rank: int, strategy: str, pattern: str, deeper: bool = False) -> list[set]:
    """Every chain of files that a repeated call enters, and one that builds its program."""
    rows = 32 if strategy == "low_latency" else 128
    x = torch.ones(rows, 512, dtype=torch.bfloat16 if ON_HOPPER else torch.float32, device=DEVICE)
    w = torch.ones(128, 512, dtype=x.dtype, device=DEVICE)
    tile = Tile(128, 256, 64, num_stages=3, tma=True) if strategy == "hopper" else Tile(64, 64, 64)
    call, plan = OPERATIONS[pattern], plan_of(strategy, tile=tile)
    found: set[tuple[str, ...]] = set()

    def entered(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            found.add(chain_of(frame))

    def followed() -> set[tuple[str, ...]]:
        found.clear()
        engine = mock.patch.multiple(cpu_backend, ctypes=ONE_MORE if deeper else ctypes)
        with engine, mock.patch.object(collectives, "_LOOK_S", 60):  # nobody is late here
            sys.setprofile(entered)
            call(x, w, dist.group.WORLD, plan=plan)
            sys.setprofile(None)
        dist.barrier()
        return found - {()}

    # by Python, on GPUs too, and as where a process sees the GPUs of all ranks
    by_python = mock.patch.object(calls, "is_watched", return_value=True)
    with by_python, mock.patch.object(copies, "spare_sms", return_value=0):
        for _ in range(2):  # a region's views are made once
            call(x, w, dist.group.WORLD, plan=plan)
        repeated = followed()
        forget_programs(workspaces()[0])
        return [repeated, followed()]


def copied(*given: int) -> None:
    ctypes.memmove(*given)
    workspaces()[0].ask()  # which asks the agreement


ONE_MORE = SimpleNamespace(memmove=copied, c_int32=ctypes.c_int32)


# of the strategy, torch's functions and the collectives that a program calls
CALLED = {
    "pipelined": {"overlap/transfer", "overlap/library_gemm"},
    "sequential": {"overlap/library_gemm", "overlap/collectives"},
    "signalled": {"overlap/signalled", "overlap/stage", "overlap/collectives"},
}
GATHERING = {
    ("fused", "ag_gemm"), ("pipelined", "ag_gemm"), ("hopper", "ag_gemm"),
    ("fused", "gemm_ar"), ("pipelined", "gemm_ar"),
}  # fmt: skip


@pytest.mark.parametrize(("strategy", "pattern"), KERNELS)
def test_a_call_goes_through_five_files_at_most(strategy, pattern):
    kernels = {f"kernels/{name}" for name in KERNELS[strategy, pattern]}
    called = CALLED.get(strategy, {"overlap/transfer"})
    for found, builds in on_device(chains, 2, strategy, pattern, environment=PLAIN):
        longest = max(found, key=len)
        assert len(longest) <= LONGEST, " > ".join(longest)
        assert {chain[0] for chain in found} == {"ops"}
        # the same as a list: what is open at once, and dispatch, which has returned by then
        host = {"ops", "dispatch", "overlap/calls"} | called
        assert opened(found) == host
        listed = {"overlap/by_c"} if strategy == "sequential" else set()  # all of it is torch's
        listed |= {"overlap/gather"} if (strategy, pattern) in GATHERING else set()
        assert opened(builds) == host | {f"overlap/{strategy}"} | kernels | listed


def opened(found: set[tuple[str, ...]]) -> set[str]:
    return {f for chain in found for f in chain if not f.startswith("symm/")} - BESIDE


def test_a_sixth_file_is_seen():
    for found, _ in run_ranks(chains, 2, "fused", "ag_gemm", True, environment=PLAIN):
        assert max(map(len, found)) == LONGEST + 1
