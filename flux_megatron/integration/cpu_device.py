"""Megatron-core on CPU tensors: torch.cuda is made to answer, in a training rank without a GPU.

Megatron places its own buffers on `torch.cuda.current_device()` or "cuda", keeps the CUDA
generator's state in its random number tracker, waits on the current stream, and compares tensor
types with "torch.cuda.FloatTensor". Only those are answered; `is_available()` stays False, so
callers still learn that there is no GPU. Nothing of Megatron is edited.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


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
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.to:
            args = tuple("cpu" if _is_cuda(argument) else argument for argument in args)
        return function(*args, **kwargs)


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
