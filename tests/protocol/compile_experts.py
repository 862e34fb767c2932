"""Compiles the kernels of expert parallelism, as `compile_kernels` does the others.

python compile_experts.py FILE    writes JSON: name -> {"ptx": ..., "shared_bytes": ...}
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from compile_source import call_of, codes_of, memory, write_ptx

from flux_megatron.kernels.experts import token_call
from flux_megatron.kernels.experts.a2a_gemm import a2a_gemm
from flux_megatron.kernels.experts.call import ExpertCall, exchange_counts
from flux_megatron.kernels.experts.gemm_a2a import expert_collect, gemm_a2a
from flux_megatron.kernels.experts.signalled import signalled_experts
from flux_megatron.kernels.experts.weights import ExpertWeights
from flux_megatron.kernels.experts.wgrad import expert_wgrad
from flux_megatron.kernels.triton_launch import Code
from flux_megatron.problem import Tile

WORLD_SIZE, EXPERTS = 4, 8
ROWS, SIDE = 8192, 4096
TILES = {
    80: Tile(128, 128, 64, num_warps=8, num_stages=3),
    90: Tile(128, 256, 64, num_warps=8, num_stages=3, tma=True),
}


def expert_call(layout: str, tile: Tile) -> ExpertCall:
    return ExpertCall(call_of(WORLD_SIZE), EXPERTS, ROWS, layout, tile, 32)


def shipped(tile: Tile) -> Iterator[tuple[str, Code]]:
    x, words = memory(ROWS, SIDE, dtype=torch.bfloat16), memory(1)
    w = ExpertWeights(memory(EXPERTS, SIDE, SIDE, dtype=x.dtype))
    table = memory(6, WORLD_SIZE * EXPERTS)
    for layout in ("nt", "nn"):
        about = expert_call(layout, tile)
        calls = {
            "a2a_gemm": partial(a2a_gemm, x, w, words, about, keep=layout == "nn"),
            "gemm_a2a": partial(gemm_a2a, x, w, words, about, tokens=1),
            "signalled_experts": partial(
                signalled_experts, x, x, x, w, table, far_groups=24, first=0, tile_rows=64,
                counters=words, work_counter=words, spare_sms=8, back=layout == "nt",
                layout=layout, tile=tile,
            ),
        }  # fmt: skip
        for name, call in calls.items():
            yield f"{name}{' tma' * tile.tma} {layout}", *codes_of(call)
    calls = {
        "collect": partial(expert_collect, x, x, words, about),
        "exchange_counts": partial(exchange_counts, memory(WORLD_SIZE, EXPERTS), about, rows=ROWS),
        "expert_wgrad": partial(expert_wgrad, x, x, memory(EXPERTS)),
        "expert_wgrad add": partial(expert_wgrad, x, x, memory(EXPERTS), w),
    }
    for name, call in calls.items():
        yield name, *codes_of(call)


def once() -> Iterator[tuple[str, Code]]:
    """Of tokens that travel once to a rank."""
    x, words = memory(ROWS, SIDE, dtype=torch.bfloat16), memory(1)
    chosen = memory(ROWS, WORLD_SIZE * EXPERTS, dtype=torch.bool)
    places = memory(WORLD_SIZE, ROWS, EXPERTS)
    routes = token_call.Routes(places, words, words, words, chosen, ROWS)
    weights, call = memory(*chosen.shape, dtype=torch.float32), call_of(WORLD_SIZE)
    calls = (
        partial(token_call.exchange, call, chosen, weights, 8, ROWS, False),
        partial(token_call.return_gradients, call, weights, routes, weights),
        partial(token_call.send, call, x, routes),
        partial(token_call.give_back, call, x, routes),
    )
    for code in (code for made in calls for code in codes_of(made)):
        yield code.kernel.removesuffix("_kernel"), code


if __name__ == "__main__":
    write_ptx({
        f"sm_{architecture} {name}": (code, architecture)
        for architecture, tile in TILES.items()
        for name, code in (*shipped(tile), *once())
    })  # fmt: skip
