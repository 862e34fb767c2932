"""The phases of a call, as ranges of torch's profiler and of NVTX.

| phase | what the host enqueues in it |
| --- | --- |
| gather push | pushes of x to every peer, each with its signal [A] |
| local shard | the copy of x to the local shard of the gathered buffer |
| wait | a kernel that returns when rows have arrived [A]; the wait for a collective |
| ag_gemm kernel | the kernel that gathers and multiplies |
| gemm chunk | a library GEMM, on all rows or on some |
| gemm_rs kernel | the kernel that multiplies and scatters |
| signalled_gemm kernel, gathered_gemm kernel | the kernel whose bands collectives move, or bring |
| scatter push | pushes of partial results to their owners, each with its signal [B], and of sums \
to every rank, [A] |
| arrivals | what the mailbox brings, behind [M] |
| reduce | the sum of what all ranks have sent |
| all-gather, reduce-scatter, all-reduce | the start of a collective |
| embedding_a2a kernel | the kernel that pools bags and sends them |
| gradient push, sort, gradient of rows | the pieces of its backward |
| pool, all-to-all | a library's lookup; the collective behind or before it |
| fprop, dgrad, wgrad | a pass of a layer, with the other phases inside |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.autograd import profiler

from flux_megatron import settings

PREFIX = "flux_megatron: "
_UNSEEN = nullcontext()


def phase(name: str) -> AbstractContextManager[None]:
    """A range around the host's work: while torch's profiler runs, or for NVTX with
    FLUX_MEGATRON_NVTX=1. Otherwise it does nothing and costs almost nothing.
    """
    if profiler._is_profiler_enabled or settings.get().nvtx:
        return _seen(PREFIX + name)
    return _UNSEEN


@contextmanager
def _seen(name: str) -> Iterator[None]:
    nvtx = torch.cuda.nvtx.range(name) if settings.get().nvtx else _UNSEEN
    with profiler.record_function(name), nvtx:
        yield
