"""Asks a version of Triton that nobody has run whether it can compile the Hopper kernels; nothing
runs. Three kernels together use all that the others do, and a call that has begun cannot change its
strategy any more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flux_megatron.kernels.hopper import ag_gemm as hopper_ag_gemm
from flux_megatron.kernels.hopper import gemm_rs as hopper_gemm_rs
from flux_megatron.kernels.hopper import signalled_gemm as hopper_signalled_gemm
from flux_megatron.kernels.hopper.config import TILE
from flux_megatron.kernels.triton_launch import noted
from flux_megatron.symm.signals import PARTIAL_COUNTERS, WORK_WORDS

ROWS, N, K = 512, 512, 1024  # whole tiles of two ranks


def compile_kernels(device: str = "cuda") -> None:
    """Raises what Triton raises."""
    x = torch.empty(ROWS, K, dtype=torch.bfloat16, device=device)
    w, out = x.new_empty(N, K), x.new_empty(2 * ROWS, N)
    words = torch.zeros(PARTIAL_COUNTERS + WORK_WORDS, dtype=torch.int32, device=device)
    with noted() as codes:
        hopper_ag_gemm.gemm(x, w, "nt")
        hopper_signalled_gemm.signalled_gemm(
            x, w, out, table=words, tiles=8, shards=2, counters=words, work_counter=words,
            spare_sms=0, layout="nt", tile=TILE,
        )  # fmt: skip
        for by_sm in (False, True):
            _scatter(x, w, words, by_sm)
    for code in codes:
        code.compiled()


def _scatter(x: Tensor, w: Tensor, words: Tensor, by_sm: bool) -> None:
    out = x.new_empty(len(x) * N // TILE.block_n, TILE.block_n)
    pointers = torch.zeros(2, dtype=torch.int64, device=x.device)
    hopper_gemm_rs.gemm_rs(
        x, w, outgoing=out, received=out, received_pointers=pointers, pad_pointers=pointers,
        pad=words, status=words, counters=words, partial_counters=words, work_words=words, rank=0,
        world_size=2, epoch=1, timeout_ns=10**9, tiles_comm=1, layout="nt", tile=TILE, by_sm=by_sm,
    )  # fmt: skip
