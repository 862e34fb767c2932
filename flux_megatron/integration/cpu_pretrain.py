"""An unmodified Megatron-LM training script on CPU tensors and gloo: a try-out without GPUs.

`cpu_device` serves the layers and the model. This adds what the script itself asks a GPU for:
whether there is one, its properties, streams, memory, NCCL. Nothing of Megatron is edited, and such
a run says nothing about speed.
"""

from __future__ import annotations

import collections
import types
from typing import Any

import torch
import torch.distributed as dist

from flux_megatron.integration.cpu_device import Stream, pretend_cuda
from flux_megatron.versions.python import provide_override

MEMORY = 1 << 34
# for each name a function of its own: torch._dynamo refuses one object under two names
NOTHING = ("set_device", "empty_cache", "ipc_collect", "reset_peak_memory_stats")
NO_BYTES = (
    "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
)  # fmt: skip


def pretend_gpu() -> None:
    """Patch this process, before Megatron is imported."""
    provide_override()
    cuda: Any = torch.cuda
    properties = types.SimpleNamespace(
        major=9, minor=0, name="cpu", total_memory=MEMORY, multi_processor_count=1
    )
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 8
    cuda.get_device_name = lambda *_: properties.name
    cuda.get_device_capability = lambda *_: (properties.major, properties.minor)
    cuda.get_device_properties = lambda *_: properties
    cuda.is_current_stream_capturing = lambda: False
    cuda.memory_stats = lambda *_, **__: collections.defaultdict(int)
    cuda.mem_get_info = lambda *_: (MEMORY, MEMORY)
    for name in NOTHING:
        setattr(cuda, name, lambda *_, **__: None)
    for name in NO_BYTES:
        setattr(cuda, name, lambda *_, **__: 0)
    for name in ("range_push", "range_pop"):
        setattr(cuda.nvtx, name, lambda *_, **__: None)
    cuda.default_stream = lambda *_: Stream()
    cuda.set_stream = lambda stream: None
    # a CUDA build of torch has an accelerator, and asks its driver: optimizers do in each step
    torch.accelerator.current_accelerator = lambda *_, **__: None
    torch.accelerator.is_available = lambda: False
    torch.nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign]
    # a CUDA build of torch believes that batches can be pinned, and finds no driver
    loader: Any = torch.utils.data.DataLoader
    loader.pin_memory = property(lambda self: False, lambda self, value: None)
    # dropout draws from this generator here, and each loader at its start, also at a resumed one's
    own = torch.Generator()
    loader.generator = property(lambda self: own, lambda self, value: None)
    _gloo_for_nccl()
    pretend_cuda()
    _without_cuda_toolkit()
    _stock_provider()


def _stock_provider() -> None:
    """For runs without `--flux-overlap`: the norm that stock linears get from apex on GPUs."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from flux_megatron.integration.install import build_from
    from flux_megatron.integration.provider import StockSpecProvider

    class Stock(StockSpecProvider):
        def core_attention(self) -> type:
            return DotProductAttention

    build_from(Stock)


def _gloo_for_nccl() -> None:
    original = dist.init_process_group

    def init_process_group(backend: str | None = None, *given: Any, **named: Any) -> None:
        original("gloo" if backend == "nccl" else backend, *given, **named)

    dist.init_process_group = init_process_group


def _without_cuda_toolkit() -> None:
    """What older Megatron asks of nvcc (up to 0.17) and of an absent Transformer Engine (0.16)."""
    from megatron.core import utils
    from megatron.core.transformer.moe import moe_utils

    if utils.get_te_version() is None:
        utils.get_te_version = lambda: utils.PkgVersion("0")
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    try:
        from megatron.legacy import fused_kernels
    except ImportError:
        return
    fused_kernels.load = lambda args: None
