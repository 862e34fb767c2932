"""Compiles the Gluon kernels for sm_90, in a process of its own; no GPU is needed.

    python compile_hopper.py FILE    writes JSON: name -> {"ptx", "shared_bytes", "ptxas", "sass"}

Compiled is every configuration that the strategy chooses or tries, as its launchers fix it. The
order of tiles (`GROUP_M`) is a number in the code: one value stands for all.
"""

from __future__ import annotations

import itertools
import subprocess
import tempfile
from collections.abc import Iterator
from functools import partial
from unittest import mock

import torch
import triton  # before our kernels, which would choose the interpreter on a machine without a GPU
from compile_experts import expert_call
from compile_source import assembled, codes_of, codes_of_plan, memory, write

from flux_megatron.kernels.experts import hopper_a2a_gemm, hopper_gemm_a2a
from flux_megatron.kernels.experts.weights import ExpertWeights
from flux_megatron.kernels.hopper import config as hopper_config
from flux_megatron.kernels.hopper import gathered_gemm as hopper_gathered_gemm
from flux_megatron.kernels.hopper import signalled_gemm as hopper_signalled_gemm
from flux_megatron.kernels.triton_launch import Code
from flux_megatron.overlap import hopper
from flux_megatron.problem import TRANSPORTS, Pattern, Plan, Problem

WORLD_SIZE = 4
_VARIANTS = [("nt", "bfloat16"), ("nn", "bfloat16"), ("nt", "float16")]


def _problems() -> Iterator[Problem]:
    """Shards of one tile of rows, of some, of many, and of few."""
    sizes_of = [(128, 4096), (512, 4096), (4096, 4096), (64, 4096)]
    for pattern in (Pattern.AG_GEMM, Pattern.GEMM_RS):
        for (rows, N), (layout, dtype) in itertools.product(sizes_of, _VARIANTS):
            scatters = pattern is Pattern.GEMM_RS
            same = rows == 64 and scatters  # as others
            if not same and (dtype == "bfloat16" or rows == 512):
                M, N, K = WORLD_SIZE * rows, N if scatters else WORLD_SIZE * N, WORLD_SIZE * 4096
                yield Problem(pattern, M, N, K, dtype, WORLD_SIZE, layout)
    # K too short for a fetch of each rank's tile
    yield Problem(
        Pattern.GEMM_RS, WORLD_SIZE * 4096, 4096, WORLD_SIZE * 512, "bfloat16", WORLD_SIZE
    )


def _scaled() -> Iterator[Problem]:
    """FP8: each result, with and without a split accumulator."""
    kinds = [
        (Pattern.AG_GEMM, "float8_e4m3fn", "bfloat16", False, False),
        (Pattern.AG_GEMM, "float8_e5m2", "bfloat16", True, False),
        (Pattern.AG_GEMM, "float8_e4m3fn", "float32", False, False),
        (Pattern.GEMM_RS, "float8_e4m3fn", "bfloat16", False, False),
        (Pattern.GEMM_RS, "float8_e4m3fn", "bfloat16", False, True),
        (Pattern.GEMM_RS, "float8_e5m2", "bfloat16", True, False),
        (Pattern.GEMM_RS, "float8_e4m3fn", "float32", False, False),
    ]
    for (pattern, dtype, out_dtype, split, wire), rows in itertools.product(kinds, (64, 4096)):
        M, N, K = WORLD_SIZE * rows, 4096, WORLD_SIZE * 4096
        types = {"out_dtype": out_dtype, "split_accumulator": split, "wire": wire}
        yield Problem(pattern, M, N, K, dtype, WORLD_SIZE, **types)


def _planned() -> Iterator[tuple[Problem, Plan]]:
    for problem in (*_problems(), *_scaled()):
        assert hopper.supports(problem) is None, hopper.supports(problem)
        for plan in (hopper.default_plan(problem), *hopper.candidates(problem)):
            # rows in parts of K touch the producer warp only
            high = plan.tile.block_m == 128
            as_others = high == (problem.layout == "nn") or problem.dtype == "float16"
            if not (plan.k_parts and as_others):
                yield problem, plan
    # GEMM+AR: the kernel of GEMM+RS whose sums, or results, go to every rank
    tiles = {"nt": hopper_config.TILE, "nn": hopper_config.NARROW}
    for (layout, tile), way in itertools.product(tiles.items(), TRANSPORTS):
        problem = Problem(Pattern.GEMM_AR, 8192, 4096, 16384, "bfloat16", WORLD_SIZE, layout)
        yield problem, Plan("hopper", tile=tile, transport=way)


def _named(problem: Problem, plan: Plan) -> tuple[str, Code]:
    # with a bias and a local copy in one layout only: neither touches the order of anything
    nn = problem.layout == "nn"
    code = next(codes_of_plan(problem, plan, borrows=nn, biased=nn))
    if problem.spec.gathers:
        kind = "bias" if nn else "plain"
        kind += " parts" * (plan.k_parts > 1) + " long" * (plan.tile == hopper_config.LONG)
    else:
        short = code.arguments[-1].CHUNKS < WORLD_SIZE - 1 and not problem.scaled
        kind = f"{plan.transport}{' short' * short}"
    if problem.scaled:
        kind += f" to {problem.out_dtype}" + " split_accumulator" * problem.split_accumulator
        kind += " wire" * problem.wire
    width = f"{plan.tile.block_m}x{plan.tile.block_n}"
    name = "gemm_exchange" if plan.transport == "exchange" else problem.pattern
    return f"{name} {problem.dtype} {problem.layout} {width} {kind}", code


def shipped() -> dict[str, Code]:
    found: dict[str, Code] = {}
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)):
        for problem, plan in _planned():
            name, code = _named(problem, plan)
            found.setdefault(name, code)
        return found | signalled() | gathered() | experts()


def signalled() -> dict[str, Code]:
    """The bands of GEMM+RS in both layouts, and those of GEMM+AR, which are of one shard."""
    found = {}
    for layout, shards in (("nt", WORLD_SIZE), ("nn", WORLD_SIZE), ("nt", 1)):
        x, words = memory(8192, 4096, dtype=torch.bfloat16), memory(1)
        call = partial(
            hopper_signalled_gemm.signalled_gemm, x, x[:4096], x, table=words, tiles=1024,
            shards=shards, counters=words, work_counter=words, spare_sms=8, layout=layout,
            tile=hopper_config.TILE,
        )  # fmt: skip
        found[f"signalled bfloat16 {layout} 128x256 {shards} shards"] = codes_of(call)[0]
    return found


def gathered() -> dict[str, Code]:
    """All-gathers by others; with a bias in one layout."""
    found = {}
    for layout in ("nt", "nn"):
        x, words = memory(8192, 4096, dtype=torch.bfloat16), memory(1)
        call = partial(
            hopper_gathered_gemm.gathered_gemm, x[:2048], x, x[:4096],
            x if layout == "nn" else None, x, table=words, words=words, rank=0, bands=4,
            step_us=1, spare_sms=8, layout=layout, tile=hopper_config.TILE,
        )  # fmt: skip
        found[f"gathered bfloat16 {layout} 128x256"] = codes_of(call)[0]
    return found


def experts() -> dict[str, Code]:
    """a2a_gemm, whose rows are kept for backward or not, and gemm_a2a."""
    found = {}
    tile = hopper_config.LONG
    for layout, dtype in _VARIANTS:
        x, words = memory(8192, 4096, dtype=getattr(torch, dtype)), memory(1)
        w = ExpertWeights(memory(8, 4096, 4096, dtype=x.dtype))
        about = expert_call(layout, tile)
        for name, kept in (("a2a_gemm", False), ("a2a_gemm", True), ("gemm_a2a", False)):
            if kept and (layout, dtype) != ("nt", "bfloat16"):
                continue  # it touches nothing that the layout does
            if name == "a2a_gemm":
                rows = x if kept else x[:0]
                run = partial(hopper_a2a_gemm.a2a_gemm, x, x, w, rows, words, about)
            else:
                run = partial(hopper_gemm_a2a.gemm_a2a, x, w, x, words, about, tokens=1)
            name += f" {dtype} {layout} 128x256" + " kept" * kept
            found[name] = codes_of(run)[0]
    return found


def compiled(code: Code, architecture: int) -> dict:
    """What Triton makes of it, and what the assembler says."""
    result, log = assembled(code, architecture)
    return {
        "ptx": result.asm["ptx"],
        "shared_bytes": result.metadata.shared,
        "ptxas": log,
        "sass": disassembled(result.asm["cubin"]),
    }


def disassembled(cubin: bytes) -> str:
    """The machine code as text, by the disassembler that comes with Triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", "--no-dataflow", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    write({name: (code, 90) for name, code in shipped().items()}, compiled)
