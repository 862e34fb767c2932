"""Compiles the kernels of expert parallelism, as `compile_kernels` does the others.

python compile_experts.py FILE    writes JSON: name -> {"ptx": ..., "shared_bytes": ...}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import compile_kernels
from compile_kernels import compiled, constants
from compile_source import write_ptx

from flux_megatron.kernels.experts.a2a_gemm import a2a_gemm_kernel
from flux_megatron.kernels.experts.gemm_a2a import expert_collect_kernel, gemm_a2a_kernel
from flux_megatron.kernels.experts.routes import exchange_counts_kernel
from flux_megatron.kernels.experts.signalled import signalled_experts_kernel
from flux_megatron.kernels.experts.wgrad import expert_wgrad_kernel
from flux_megatron.problem import Tile

_TYPES = {
    **dict.fromkeys(("routes", "counts", "received", "ends"), "*i32"), "pointers": "*i64",
    **dict.fromkeys(("a", "b", "dw", "home", "far", "near"), "*bf16"),
}  # fmt: skip
_ROUTES = {"WORLD_SIZE": 4, "EXPERTS": 8}
TILES = {
    80: Tile(128, 128, 64, num_warps=8, num_stages=3),
    90: Tile(128, 256, 64, num_warps=8, num_stages=3, tma=True),
}


def shipped(architecture: int) -> Iterator[tuple[str, Callable[[], dict]]]:
    tile = TILES[architecture]
    make = partial(compiled, architecture=architecture, dtype="bfloat16", tile=tile)
    for layout_nn in (False, True):
        name = f"{' tma' * tile.tma} {'nn' if layout_nn else 'nt'}"
        common = constants(tile, layout_nn) | {
            **_ROUTES, "PER_SIGNAL": 1, "HEADER": 1024, "ROWS": 32, "COLUMNS": 512, "BLOCK_G": 32,
        }  # fmt: skip
        pushed = {"PUSHERS": 24, "KEEP": layout_nn}
        yield (
            f"sm_{architecture} a2a_gemm{name}",
            partial(make, a2a_gemm_kernel, **common, **pushed),
        )
        yield f"sm_{architecture} gemm_a2a{name}", partial(make, gemm_a2a_kernel, **common)
        gemm = {n: common[n] for n in signalled_experts_kernel.arg_names if n in common}
        gemm |= {"GROUPS": 32, "FAR_GROUPS": 24, "BACK": not layout_nn}
        yield (
            f"sm_{architecture} signalled_experts{name}",
            partial(make, signalled_experts_kernel, **gemm),
        )
    collected = {**_ROUTES, "PER_SIGNAL": 1, "ROWS": 32, "COLUMNS": 512, "BLOCK_G": 32}
    yield f"sm_{architecture} collect", partial(make, expert_collect_kernel, **collected)
    exchange = {"BLOCK_M": 128, **_ROUTES, "BLOCK_R": 4, "BLOCK_E": 8, "BLOCK_G": 32, "ROWS": 32}
    yield (
        f"sm_{architecture} exchange_counts",
        partial(make, exchange_counts_kernel, **exchange, ARRIVALS=32),
    )
    for add in (False, True):
        blocks = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8, "ADD": add}
        name = f"sm_{architecture} expert_wgrad{' add' * add}"
        yield name, partial(make, expert_wgrad_kernel, **blocks)


if __name__ == "__main__":
    work = {name: make for architecture in TILES for name, make in shipped(architecture)}
    with mock.patch.dict(compile_kernels._TYPES, _TYPES):
        write_ptx(work)
