"""Megatron on CPU tensors: torch.cuda is made to answer, in a rank without a GPU.

Nothing of Megatron is edited, and such a run says nothing about speed.

`pretend_cuda` serves layers and models. Megatron-core places its own buffers on
`torch.cuda.current_device()` or "cuda", keeps the CUDA generator's state in its random number
tracker, waits on the current stream, and compares tensor types with "torch.cuda.FloatTensor". Only
those are answered; `is_available()` stays False, so callers still learn that there is no GPU.

`pretend_gpu` serves `flux-megatron run --device cpu`: a whole script of Megatron-LM, over gloo. It
adds what the script itself asks a GPU for: whether there is one, its properties, memory, NCCL.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import threading
import types
import typing
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

MEMORY = 1 << 34
# for each name a function of its own: torch._dynamo refuses one object under two names
NOTHING = ("set_device", "empty_cache", "ipc_collect", "reset_peak_memory_stats")
KERNELS = ("transformer_engine.pytorch.optimizers", "apex.optimizers", "amp_C")  # of optimizers
NO_BYTES = (
    "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
)  # fmt: skip


class _Generator:
    """A state to seed, save and fork in place of the CUDA generator's.

    Not the CPU generator's own: Megatron forks the tracker while it draws initial weights on the
    CPU.
    """

    def __init__(self) -> None:
        self.state = torch.Generator().get_state()

    def seed(self, seed: int) -> None:
        self.state = torch.Generator().manual_seed(seed).get_state()

    def get(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.state.clone()

    def set(self, state: torch.Tensor, *_: Any, **__: Any) -> None:
        self.state = state.clone()


class Stream:
    """The only stream: its work is always done."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or self

    def wait(self, stream: Any = None) -> None: ...


class _CpuForCuda(TorchFunctionMode):
    """Reads "cuda" as "cpu" wherever a torch function is given a device."""

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if "pin_memory" in kwargs:  # without a driver there is no memory that can be pinned
            kwargs["pin_memory"] = False
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return function(*args).replace("torch.", "torch.cuda.", 1)
        if function is torch.Tensor.cpu:
            return args[0].clone()  # never the same memory: who offloads frees the GPU's
        if function is torch.Tensor.to and any(map(_is_cpu, (*args[1:2], kwargs.get("device")))):
            kwargs["copy"] = True
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.to:
            args = tuple("cpu" if _is_cuda(argument) else argument for argument in args)
        return function(*args, **kwargs)


def _is_cpu(value: Any) -> bool:
    return isinstance(value, (str, torch.device)) and str(value) == "cpu"


def _is_cuda(value: Any) -> bool:
    return isinstance(value, (str, torch.device)) and str(value).startswith("cuda")


def pretend_cuda() -> None:
    """Patch this process. Call once, before the first Megatron model is built."""
    from megatron.core.tensor_parallel import random as tracker

    generator = _Generator()
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None  # before a checkpoint is written
    torch.cuda.current_stream = lambda *_: Stream()  # type: ignore[assignment]
    torch.cuda.Stream = Stream  # type: ignore[assignment,misc]
    torch.cuda.stream = lambda stream: stream  # type: ignore[assignment,return-value]
    torch.cuda.manual_seed = generator.seed
    torch.cuda.get_rng_state = generator.get
    torch.cuda.set_rng_state = generator.set  # type: ignore[assignment]
    tracker._get_cuda_rng_state = generator.get
    tracker._set_cuda_rng_state = generator.set
    _CpuForCuda().__enter__()
    _in_threads()


def _in_threads() -> None:
    """The mode is the calling thread's: those that begin later enter it too, as Ray's of actors."""
    thread: Any = threading.Thread
    run = thread.run

    def run_on_cpu(self: threading.Thread) -> None:
        with _CpuForCuda():
            run(self)

    thread.run = run_on_cpu


def pretend_gpu() -> None:
    """Patch this process, before Megatron is imported."""
    provide_override()
    _without_optimizer_kernels()
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


def _without_optimizer_kernels() -> None:
    """Megatron's optimizers are torch's then, as where neither package is installed."""
    with contextlib.suppress(ImportError):
        import transformer_engine.pytorch  # noqa: F401  (it imports its own)
    for name in KERNELS:
        sys.modules[name] = None  # type: ignore[assignment]  # an ImportError to whoever asks


def _stock_provider() -> None:
    """For runs without `--flux-overlap`: the norm that stock linears get from apex on GPUs."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from flux_megatron.integration.install import build_from
    from flux_megatron.integration.provider import StockSpecProvider

    transformer_engine.HAVE_TE = False  # where it is installed it cannot run

    class Stock(StockSpecProvider):
        def core_attention(self) -> type:
            return DotProductAttention

    build_from(Stock)


def _gloo_for_nccl() -> None:
    original = dist.init_process_group

    def init_process_group(backend: str | None = None, *given: Any, **named: Any) -> None:
        # also in a list of devices, as "cpu:gloo,cuda:nccl"
        original("gloo" if "nccl" in (backend or "") else backend, *given, **named)

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


def provide_override() -> None:
    """Give `typing` a decorator `override` that does nothing where it has none, before Python 3.12:
    Megatron-LM after 0.17 takes it from there. In the processes that multiprocessing spawns too:
    Megatron's checkpoint writers import the script again.
    """
    if hasattr(typing, "override"):
        return
    typing.override = lambda method: method  # type: ignore[attr-defined]
    from multiprocessing import spawn

    original: Any = spawn.get_preparation_data

    @functools.wraps(original)
    def get_preparation_data(name: str) -> dict[str, Any]:
        return original(name) | {"flux_megatron": _Provided()}

    spawn.get_preparation_data = get_preparation_data


class _Provided:
    """Whoever unpickles it has `override`; a new process does so before it imports the script."""

    def __reduce__(self) -> Any:
        return provide_override, ()
