"""Megatron's own graphs of layers, `--cuda-graph-impl local`, where it makes them wrong.

From 0.16.0 to 0.17.1 the first layer's input has memory that a later graph takes for gradients,
though this layer's backward reads it again: the gradients of its input norm, and of the embedding,
are wrong. And forward passes that warm up change buffers of the layer, as a router's counts.
Megatron-LM#4433 mends both in 0.18. Commits between releases do not have the number of what they
do, so all are mended that have such memory: where Megatron did it, nothing changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.transformer import cuda_graphs

from flux_megatron.integration.replaced import around


def mend(undo: contextlib.ExitStack) -> None:
    """Until `undo` closes."""
    if not hasattr(cuda_graphs._CudagraphGlobalRecord, "tensor_reuse_pool"):
        return

    @around(cuda_graphs._CudaGraphRunner, "create_fwd_graph", undo)
    def create_fwd_graph(original: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
        before = [(one, one.clone()) for one in runner.base_module.buffers()]
        with contextlib.ExitStack() as kept:
            if runner.training and torch.is_grad_enabled():
                kept.enter_context(_inputs_kept())
            original(runner, *args, **kwargs)
        for buffer, value in before:
            buffer.copy_(value)


@contextlib.contextmanager
def _inputs_kept() -> Iterator[None]:
    """Nothing goes back to the memory that later graphs take."""
    pool = cuda_graphs._CudagraphGlobalRecord.tensor_reuse_pool
    pool.insert = lambda tensor: None
    try:
        yield
    finally:
        del pool.insert
