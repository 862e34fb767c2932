"""Whether this Triton compiles the Hopper kernels: asked of versions that nobody has run, before a
strategy chooses them. A call that has begun cannot change its strategy any more.

Compiled are three kernels, which together use all that the others do; nothing runs. It takes some
ten seconds once, then Triton's cache has them.
"""

from __future__ import annotations

import torch

from flux_megatron.kernels import hopper_ag_gemm, hopper_gemm_rs, hopper_signalled_gemm
from flux_megatron.kernels.hopper_config import TILE
from flux_megatron.kernels.triton_launch import compiling_only
from flux_megatron.symm.signals import PARTIAL_COUNTERS, WORK_WORDS

ROWS, N, K = 512, 512, 1024  # whole tiles of two ranks


def compile_kernels(device: str = "cuda") -> None:
    """Raises what Triton raises."""
    x = torch.empty(ROWS, K, dtype=torch.bfloat16, device=device)
    w, out = x.new_empty(N, K), x.new_empty(2 * ROWS, N)
    words = torch.zeros(PARTIAL_COUNTERS + WORK_WORDS, dtype=torch.int32, device=device)
    pointers = torch.zeros(2, dtype=torch.int64, device=device)
    with compiling_only():
        hopper_ag_gemm.gemm(x, w, "nt")
        hopper_signalled_gemm.signalled_gemm(
            x, w, out, table=words, tiles=8, shards=2, counters=words, work_counter=words,
            spare_sms=0, layout="nt", tile=TILE,
        )  # fmt: skip
        for by_sm in (False, True):
            hopper_gemm_rs.gemm_rs(
                x, w, parts=out.view(-1, TILE.block_n), received=out.view(-1, TILE.block_n),
                received_pointers=pointers, pad_pointers=pointers, pad=words, status=words,
                counters=words, partial_counters=words, work_words=words, rank=0, world_size=2,
                epoch=1, timeout_ns=10**9, tiles_comm=1, layout="nt", tile=TILE, by_sm=by_sm,
            )  # fmt: skip
