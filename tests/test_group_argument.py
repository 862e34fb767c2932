"""Every public operation without a group: the error comes before anything could wait."""

from __future__ import annotations

import pytest
import torch

import flux_megatron
from flux_megatron.nn import all_reduced, functions

X, W = torch.ones(4, 4), torch.ones(4, 4)
COUNTS = torch.ones(1, 1, dtype=torch.int32)
INDICES, OFFSETS = torch.zeros(2, dtype=torch.int64), torch.tensor([0, 1, 2])
CALLS = {
    "all_gather_gemm": lambda: flux_megatron.all_gather_gemm(X, W, None),
    "with gradients": lambda: flux_megatron.all_gather_gemm(X.clone().requires_grad_(), W, None),
    "gemm_reduce_scatter": lambda: flux_megatron.gemm_reduce_scatter(X, W, None),
    "gemm_all_reduce": lambda: flux_megatron.gemm_all_reduce(X, W, None),
    "gemv_all_reduce": lambda: flux_megatron.gemv_all_reduce(X, W, None),
    "many rows": lambda: flux_megatron.gemv_all_reduce(torch.ones(99, 4), W, None),
    "a2a_gemm": lambda: flux_megatron.a2a_gemm(X, W[None], COUNTS, None, capacity=4),
    "gemm_a2a": lambda: flux_megatron.gemm_a2a(X, W[None], COUNTS, None, tokens=4),
    "embedding_all_to_all": lambda: flux_megatron.embedding_all_to_all(
        W[None], INDICES, OFFSETS, None
    ),
    "column_parallel_linear": lambda: functions.column_parallel_linear(X, W, None, group=None),
    "row_parallel_linear": lambda: functions.row_parallel_linear(X, W, group=None),
    # it would return this rank's share for the sum
    "row_linear": lambda: all_reduced.row_linear(X, W, group=None),
}


@pytest.mark.parametrize("name", CALLS)
def test_none_is_no_group(name):
    with pytest.raises(ValueError, match=r"^group None given, the process group of the ranks"):
        CALLS[name]()
