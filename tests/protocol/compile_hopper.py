"""Compiles the Gluon kernels for sm_90, in a process of its own; no GPU is needed.

    python compile_hopper.py FILE    writes JSON: name -> {"ptx", "shared_bytes", "ptxas", "sass"}

Compiled is every configuration that the strategy chooses or tries, as its launchers fix it. The
order of tiles (`GROUP_M`) is a number in the code: one value stands for all.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from unittest import mock

import torch
import triton  # before our kernels, which would choose the interpreter on a machine without a GPU
from compile_source import assembled, fixed_by, source_of
from forked_work import write_results
from kept_code import compiled_or_kept
from recorded_launches import launchers_of, memory
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from flux_megatron.kernels import launch
from flux_megatron.kernels.experts import hopper_a2a_gemm, hopper_gemm_a2a
from flux_megatron.kernels.experts.call import ExpertCall
from flux_megatron.kernels.experts.weights import ExpertWeights
from flux_megatron.kernels.hopper import ag_gemm as hopper_ag_gemm
from flux_megatron.kernels.hopper import config as hopper_config
from flux_megatron.kernels.hopper import gemm_rs as hopper_gemm_rs
from flux_megatron.kernels.hopper import signalled_gemm as hopper_signalled_gemm
from flux_megatron.kernels.hopper.gathered_sums import Gathering
from flux_megatron.kernels.triton_launch import Launcher
from flux_megatron.overlap import hopper
from flux_megatron.problem import Pattern, Plan, Problem
from flux_megatron.scaling import Scaling

_SM_90 = GPUTarget("cuda", 90, 32)
SMS = 132  # of an H100 or H200
WORLD_SIZE = 4
_GL_DTYPE = {
    "bfloat16": (gl.bfloat16, "bf16"), "float16": (gl.float16, "fp16"),
    "float32": (gl.float32, "fp32"), "float8_e4m3fn": (gl.float8e4nv, "fp8e4nv"),
    "float8_e5m2": (gl.float8e5, "fp8e5"),
}  # fmt: skip
_VARIANTS = [("nt", "bfloat16"), ("nn", "bfloat16"), ("nt", "float16")]
_BLOCKS = {  # of tensor descriptors, by the fields of a tile
    "x_desc": ("block_m", "block_k"),
    "gathered_desc": ("block_m", "block_k"),
    "gathered_desc gemm_ar": ("block_m", "block_n"),
    "received_desc a2a_gemm": ("block_m", "block_k"),
    "w_desc nt": ("block_n", "block_k"),
    "w_desc nn": ("block_k", "block_n"),
    "y_desc ag_gemm": ("group", "slice"),
    **dict.fromkeys(("y_desc", "parts_desc", "received_desc", "out_desc"), ("block_m", "block_n")),
}
_PAYLOAD = ("x", "bias", "local_rows", "y", "kept", "result", "tiles_of_others")
_OF_GEMM_AR = {
    "gathered_desc", "gathered_pointers", "gather_pads", "gather_pad", "gather_epoch", "result",
    "drawn", "M",
}  # fmt: skip
_TYPES = {
    "timeout_ns": "i64",
    **dict.fromkeys(("x_scale", "w_scale"), "*fp32"),
    "partials": "*fp32",
    **dict.fromkeys(("pad", "status", "counters", "partial_counters", "work_words"), "*i32"),
    **dict.fromkeys(("gather_pad", "drawn"), "*i32"),
    **dict.fromkeys(("received_pointers", "pad_pointers"), "*i64"),
    **dict.fromkeys(("gathered_pointers", "gather_pads", "pointers"), "*i64"),
    **dict.fromkeys(("table", "routes"), "*i32"),
}


@dataclass(frozen=True)
class Configuration:
    name: str
    dtype: str
    layout: str
    launcher: Launcher
    out_dtype: str = ""
    wire: bool = False


def _problems(pattern: Pattern) -> Iterator[Problem]:
    """Shards of one tile of rows, of some, of many, and of few."""
    sizes_of = [(128, 4096), (512, 4096), (4096, 4096), (64, 4096)]
    for (rows, N), (layout, dtype) in itertools.product(sizes_of, _VARIANTS):
        scatters = pattern is Pattern.GEMM_RS
        same = rows == 64 and scatters  # as others
        if not same and (dtype == "bfloat16" or rows == 512):
            sizes = {"M": WORLD_SIZE * rows, "N": WORLD_SIZE * N, "K": WORLD_SIZE * 4096}
            if scatters:
                sizes["N"] = N
            yield Problem(pattern, dtype=dtype, world_size=WORLD_SIZE, layout=layout, **sizes)
    if pattern is Pattern.GEMM_RS:  # K too short for a fetch of each rank's tile
        yield Problem(pattern, WORLD_SIZE * 4096, 4096, WORLD_SIZE * 512, "bfloat16", WORLD_SIZE)


def _plans(problem: Problem) -> list[Plan]:
    assert hopper.supports(problem) is None, hopper.supports(problem)
    return [hopper.default_plan(problem), *hopper.candidates(problem)]


def _launchers(problem: Problem, plan: Plan) -> Iterator[tuple[str, Launcher]]:
    if problem.pattern is Pattern.AG_GEMM:
        # in one layout only: neither touches the order of anything
        options = dict.fromkeys(("bias", "copy_local"), problem.layout == "nn")
        # so with rows in parts of K, which touch the producer warp only
        high = plan.tile.block_m == 128
        as_others = high == (problem.layout == "nn") or problem.dtype == "float16"
        if plan.k_parts and as_others:
            return
        launcher = _gathering(problem, plan, **options)
        kind = "bias" if options["bias"] else "plain"
        kind += " parts" * (plan.k_parts > 1) + " long" * (plan.tile == hopper_config.LONG)
        yield kind, launcher
        return
    launcher = _scattering(problem, plan)
    short = fixed_by(launcher)[0]["CONFIG"].CHUNKS < WORLD_SIZE - 1 and not problem.scaled
    yield f"{plan.transport}{' short' * short}", launcher


def _operands(problem: Problem) -> tuple[Tensor, Tensor, Scaling | None]:
    """x, w and what scales their product."""
    dtype, K, N = getattr(torch, problem.dtype), problem.K_local, problem.N_local
    rows = problem.M_shard if problem.spec.gathers else problem.M
    w = memory(N, K, dtype=dtype) if problem.layout == "nt" else memory(K, N, dtype=dtype)
    scaling = None
    if problem.scaled:
        scale, out_dtype = memory(1, dtype=torch.float32), getattr(torch, problem.out_dtype)
        split, wire = problem.split_accumulator, problem.wire
        scaling = Scaling(scale, scale, out_dtype, split, wire=wire)
    return memory(rows, K, dtype=dtype), w, scaling


def _gathering(problem: Problem, plan: Plan, *, bias: bool, copy_local: bool) -> Launcher:
    x, w, scaling = _operands(problem)
    gathered, words = memory(problem.M, problem.K_local, dtype=x.dtype), memory(1)
    call = partial(
        hopper_ag_gemm.ag_gemm, x, gathered, w, x if bias else None, pad=words, status=words,
        partial_counters=words, work_words=words, rank=0, epoch=1, timeout_ns=1, comm_rows=1,
        layout=problem.layout, tile=plan.tile, copy_local=copy_local,
        k_parts=max(1, plan.k_parts), scaling=scaling,
    )  # fmt: skip
    return launchers_of(call)[0]


def _scattering(problem: Problem, plan: Plan, gathers: bool = False) -> Launcher:
    x, w, scaling = _operands(problem)
    dtype = scaling.out_dtype if scaling else x.dtype
    dtype = torch.float8_e4m3fn if problem.wire else dtype
    out, words = memory(1, plan.tile.block_n, dtype=dtype), memory(1)
    y = memory(problem.M, problem.N_local, dtype=dtype)
    gathering = Gathering(y, y, words, words, words, 1, words)
    call = partial(
        hopper_gemm_rs.gemm_rs, x, w, parts=out, received=out, received_pointers=words,
        pad_pointers=words, pad=words, status=words, counters=words, partial_counters=words,
        work_words=words, rank=0, world_size=WORLD_SIZE, epoch=1, timeout_ns=1, tiles_comm=1,
        layout=problem.layout, tile=plan.tile, by_sm=plan.transport == "sm", scaling=scaling,
        gathering=gathering if gathers else None,
    )  # fmt: skip
    return launchers_of(call)[0]


def shipped() -> dict[str, Configuration]:
    found: dict[str, Configuration] = {}
    for pattern in (Pattern.AG_GEMM, Pattern.GEMM_RS):
        for problem in _problems(pattern):
            for plan in _plans(problem):
                width = f"{plan.tile.block_m}x{plan.tile.block_n}"
                for options, launcher in _launchers(problem, plan):
                    name = f"{pattern} {problem.dtype} {problem.layout} {width} {options}"
                    made = Configuration(name, problem.dtype, problem.layout, launcher)
                    found.setdefault(name, made)
    return found | scaled() | gathering() | signalled() | experts()


def scaled() -> dict[str, Configuration]:
    """FP8: the tiles of the default plans for each result, with and without a split accumulator."""
    found = {}
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
        problem = Problem(pattern, M, N, K, dtype, WORLD_SIZE, **types)
        for plan in _plans(problem):
            width = f"{plan.tile.block_m}x{plan.tile.block_n}"
            for options, launcher in _launchers(problem, plan):
                options += f" to {out_dtype}" + " split_accumulator" * split + " wire" * wire
                name = f"{pattern} {dtype} nt {width} {options}"
                made = Configuration(name, dtype, "nt", launcher, out_dtype, wire)
                found.setdefault(name, made)
    return found


def gathering() -> dict[str, Configuration]:
    """GEMM+AR: the kernel of GEMM+RS whose sums go to every rank."""
    found = {}
    for layout, by_sm, tile in (
        ("nt", False, hopper_config.TILE), ("nt", True, hopper_config.TILE),
        ("nn", False, hopper_config.NARROW), ("nn", True, hopper_config.NARROW),
    ):  # fmt: skip
        way = "sm" if by_sm else "copy_engine"
        problem = Problem(Pattern.GEMM_RS, 8192, 4096, 16384, "bfloat16", WORLD_SIZE, layout)
        plan = Plan("hopper", tile=tile, transport=way)
        launcher = _scattering(problem, plan, gathers=True)
        name = f"gemm_ar bfloat16 {layout} 128x{tile.block_n} {way}"
        found[name] = Configuration(name, "bfloat16", layout, launcher)
    return found


def signalled() -> dict[str, Configuration]:
    """The bands of GEMM+RS in both layouts, and those of GEMM+AR, which are of one shard."""
    found = {}
    for layout, shards in (("nt", WORLD_SIZE), ("nn", WORLD_SIZE), ("nt", 1)):
        x, words = memory(8192, 4096, dtype=torch.bfloat16), memory(1)
        call = partial(
            hopper_signalled_gemm.signalled_gemm, x, x[:4096], x, table=words, tiles=1024,
            shards=shards, counters=words, work_counter=words, spare_sms=8, layout=layout,
            tile=hopper_config.TILE,
        )  # fmt: skip
        (launcher,) = launchers_of(call)
        name = f"signalled bfloat16 {layout} 128x256 {shards} shards"
        found[name] = Configuration(name, "bfloat16", layout, launcher)
    return found


def experts() -> dict[str, Configuration]:
    """a2a_gemm, whose rows are kept for backward or not, and gemm_a2a."""
    found = {}
    tile = hopper_config.LONG
    for layout, dtype in _VARIANTS:
        x, words = memory(8192, 4096, dtype=getattr(torch, dtype)), memory(1)
        w = ExpertWeights(memory(8, 4096, 4096, dtype=x.dtype))
        call = mock.MagicMock(epoch=1)
        call.region.configure_mock(world_size=WORLD_SIZE, rank=0)
        about = ExpertCall(call, 8, len(x), layout, tile, 32)
        for name, kept in (("a2a_gemm", False), ("a2a_gemm", True), ("gemm_a2a", False)):
            if kept and (layout, dtype) != ("nt", "bfloat16"):
                continue  # it touches nothing that the layout does
            if name == "a2a_gemm":
                rows = x if kept else x[:0]
                run = partial(hopper_a2a_gemm.a2a_gemm, x, x, w, rows, words, about)
            else:
                run = partial(hopper_gemm_a2a.gemm_a2a, x, w, x, words, about, tokens=1)
            name += f" {dtype} {layout} 128x256" + " kept" * kept
            found[name] = Configuration(name, dtype, layout, launchers_of(run)[0])
    return found


def _type(name: str, configuration: Configuration) -> str:
    dtype = configuration.dtype
    if configuration.out_dtype:
        travels = name in ("parts_desc", "received_desc", "tiles_of_others")
        if name == "w_desc" or (travels and configuration.wire):
            dtype = "float8_e4m3fn"
        elif travels or name in ("y_desc", "bias"):
            dtype = configuration.out_dtype
    gl_dtype, short = _GL_DTYPE[dtype]
    keys = (f"{name} {word}" for word in configuration.name.split())
    key = next((key for key in keys if key in _BLOCKS), name)
    if key in _BLOCKS:
        tile = configuration.launcher._tile
        sides = {**asdict(tile), "slice": hopper_config.SLICE_COLUMNS}
        config = fixed_by(configuration.launcher)[0]["CONFIG"]
        sides["group"] = tile.block_m // getattr(config, "GROUPS", 1)
        block = [sides[side] for side in _BLOCKS[key]]
        layout = gl.NVMMASharedLayout.get_default_for(block, gl_dtype)
        return f"tensordesc<{short}[{','.join(map(str, block))}],{layout!r}>"
    return f"*{short}" if name in _PAYLOAD else _TYPES.get(name, "i32")


def compiled(configuration: Configuration) -> dict:
    """What Triton makes of it, and what the assembler says."""
    launcher = configuration.launcher
    names, (constexprs, _) = launcher._kernel.arg_names, fixed_by(launcher)
    if not configuration.name.startswith("gemm_ar"):
        constexprs |= dict.fromkeys(_OF_GEMM_AR & {*names} if "gather_pad" in names else ())
    types = {n: _type(n, configuration) for n in names if n not in constexprs}
    specialised = {one.name for one in launcher._kernel.params if not one.do_not_specialize}
    sizes = {"M_shard", "N", "K"} & specialised
    source = source_of(launcher._kernel, types, constexprs, sizes, GluonASTSource)
    options = {"num_warps": launcher._tile.num_warps}

    def make() -> dict:
        result, log = assembled(source, _SM_90, options)
        return {
            "ptx": result.asm["ptx"],
            "shared_bytes": result.metadata.shared,
            "ptxas": log,
            "sass": disassembled(result.asm["cubin"]),
        }

    return compiled_or_kept(source, _SM_90, options, make)


def disassembled(cubin: bytes) -> str:
    """The machine code as text, by the disassembler that comes with Triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", "--no-dataflow", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main(path: str) -> None:
    hopper_gpu = {"get_device_capability": lambda: (9, 0)}
    with (
        mock.patch.multiple(torch.cuda, **hopper_gpu),
        mock.patch.object(launch, "sms", return_value=SMS),
    ):
        found = shipped()
        work = {name: partial(compiled, made) for name, made in found.items()}
        write_results(work, path)


if __name__ == "__main__":
    main(sys.argv[1])
