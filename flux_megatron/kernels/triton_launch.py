"""How a kernel is launched. It uses what Triton keeps private, which `triton_private` lists.

| Triton | a compiled kernel is launched by |
| --- | --- |
| 3.7 to 3.9 | `compiled.run`, with all arguments, descriptors as they are |
| 3.6 | the same; with host descriptors by the launcher behind it, with descriptors expanded |
| others | Triton's own launch |
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch
import triton

from flux_megatron.kernels import native_launch, triton_private
from flux_megatron.problem import Tile
from flux_megatron.symm.enqueue import Operand
from flux_megatron.symm.lru_cache import LRUCache
from flux_megatron.symm.program import Memory
from flux_megatron.symm.steps import Launch, Slot
from flux_megatron.versions.triton import run_expands_descriptors, runs_directly

# of this process, by kernel
launches: Counter[str] = Counter()
_runtime = triton.knobs.runtime
OutOfResources = triton.OutOfResources  # raised before anything of the launch is enqueued
_compiled: dict[tuple, Any] = {}  # kernels, by all that they were compiled for


def _descriptor_memory(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


_noting: ContextVar[list[Code] | None] = ContextVar("noting", default=None)
_ON_HOST = -1


class Code(NamedTuple):
    """All that Triton compiles a kernel for, of a launch with whole 16-byte addresses: for each
    parameter a constant, None, the dtype of a tensor, that and the block of a descriptor, or a
    number of the size that the code depends on.
    """

    module: str
    kernel: str
    arguments: tuple
    options: tuple[tuple[str, int], ...]

    def compiled(self) -> Any:
        """By Triton, or found on disk."""
        kernel = getattr(import_module(self.module), self.kernel)
        hash_in_order(kernel)
        given = [_example(one) for one in self.arguments]
        return kernel.warmup(*given, grid=(1,), **dict(self.options))


def _example(argument: Any) -> Any:
    """What Triton compiles the same for as for an argument of `Code`. It takes a dtype itself."""
    if isinstance(argument, tuple):
        from flux_megatron.kernels.descriptors import example

        return example(*argument)
    return argument


def partial_sums(like: Memory, count: int, counters: Memory) -> Memory:
    """New memory for so many float32, or for none any address of such: another type would be
    another kernel.
    """
    if not count:
        return counters.view(torch.float32)
    return like.new_empty(count, dtype=torch.float32)


@contextmanager
def noted() -> Iterator[list[Code]]:
    """Launches of this thread inside are noted and nothing else."""
    found: list[Code] = []
    token = _noting.set(found)
    try:
        yield found
    finally:
        _noting.reset(token)


def hash_in_order(function: Any) -> None:
    """Have Triton hash a function after all that it calls. Its hash has the constants of what it
    calls only where that was hashed before it (3.6 to 3.9), so without this a kernel's place on
    disk depended on what the process had compiled before, and most were compiled anew in each run.
    """
    if getattr(function, "hash", "") is not None:
        return
    scope, nodes = function.get_capture_scope(), [*ast.walk(function.parse())]
    named = [scope.get(node.id) for node in nodes if isinstance(node, ast.Name)]
    modules = [one for one in named if isinstance(one, ModuleType)]
    attributes = [node.attr for node in nodes if isinstance(node, ast.Attribute)]
    named += [getattr(module, name, None) for module in modules for name in attributes]
    for one in named:
        for callee in getattr(one, "hash_attrs", (one,)):  # those of an aggregate
            if callee is not function:
                hash_in_order(callee)
    function.cache_key  # noqa: B018, which hashes it


class Launcher:
    """A kernel with everything fixed but its tensors and the numbers that change from call to call.

    The kernel's parameters are, in this order: tensors, descriptors first, numbers that Triton does
    not specialise, sizes, constexprs. The tile's sizes go to the constexprs of the same names.
    A thread has at most `registers`, or as many as the compiler wants (0).

    Triton's own launch looks anew at every argument. Here nothing can have changed that the code
    depends on but the alignment of addresses, so after the first launch with whole 16-byte
    addresses such launches go to the compiled kernel directly. All others are Triton's. Launchers
    of other sizes that need the same code share it: a size that was never seen compiles nothing.
    A tensor that is None, or of another dtype, makes other code: it has a launcher of its own, and
    launches that are Triton's refuse it.
    """

    def __init__(
        self, kernel, tile: Tile, sizes: tuple[int, ...] = (), registers: int = 0, **constexprs
    ) -> None:
        values = {
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "GROUP_M": tile.group_m,
            "TMA": tile.tma,
            "NUM_WARPS": tile.num_warps,
            **constexprs,
        }
        named = [name for name in kernel.arg_names if name in values]
        assert kernel.arg_names[-len(named) :] == named or not named, "constexprs come last"
        self._fixed = (*sizes, *(values[name] for name in named))
        self._kernel, self._tile = kernel, tile
        self._options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        if registers:
            self._options["maxnreg"] = registers
        self._named = kernel.__module__, kernel.__name__
        self.name = kernel.__name__.removesuffix("_kernel")
        self._direct: Callable[..., None] | None = None
        self._compiled = None
        self._layout: native_launch.Layout | None = None
        self._is_compiled = hasattr(kernel, "params")  # not interpreted
        self._dtypes: list | None = None
        self._device: int | None = None

    def launch(self, tensors: Sequence, numbers: Sequence[int], grid: tuple[int, ...]) -> None:
        if self._device is None:
            self._device = _device_of(tensors)
        if self._device == _ON_HOST or self._device == torch.cuda.current_device():
            self._launch(tensors, numbers, grid)
            return
        with torch.cuda.device(self._device):
            self._launch(tensors, numbers, grid)

    def _launch(self, tensors: Sequence, numbers: Sequence[int], grid: tuple[int, ...]) -> None:
        if (noting := _noting.get()) is not None:
            noting.append(self.code(tensors, numbers))
            return
        launches[self.name] += 1
        if self._tile.tma:
            # per thread, and autograd runs backward in threads of its own: set it where it is used
            triton.set_allocator(_descriptor_memory)
        addresses, bits = [], 0
        for tensor in tensors:
            address = tensor.data_ptr() if hasattr(tensor, "data_ptr") else tensor
            if address is not tensor:
                bits |= address
            addresses.append(address)
        aligned = bits % 16 == 0
        if aligned and not has_hooks():
            if self._direct is None and self._is_compiled:
                self._use(_compiled.get(self._code_for(tensors, numbers)))
            if self._direct is not None:
                self._direct(grid, *addresses, *numbers, *self._fixed)
                return
        dtypes = [getattr(tensor, "dtype", None) for tensor in tensors]
        assert self._dtypes in (None, dtypes), f"dtypes {dtypes} given, {self._dtypes} expected"
        self._dtypes = dtypes
        hash_in_order(self._kernel)
        compiled = self._kernel[grid](*tensors, *numbers, *self._fixed, **self._options)
        if aligned and compiled is not None:
            if self._is_compiled:
                _compiled[self._code_for(tensors, numbers)] = compiled
            self._use(compiled)

    def _use(self, compiled) -> None:
        """Launch this kernel from now on, if there is one."""
        if compiled is not None:
            self._direct, self._compiled = _direct_launch(compiled), compiled

    def code(self, tensors: Sequence, numbers: Sequence) -> Code:
        """That of a launch with whole 16-byte addresses."""
        given = (*map(_kind, tensors), *numbers, *self._fixed)
        arguments = [
            value if parameter.is_constexpr else _sized(value, parameter)
            for value, parameter in zip(given, self._kernel.params, strict=True)
        ]
        return Code(*self._named, tuple(arguments), tuple(self._options.items()))

    def _code_for(self, tensors: Sequence, numbers: Sequence) -> tuple:
        hash_in_order(self._kernel)
        return self._device, self._kernel, self.code(tensors, numbers)

    def native(self, step: Launch, scratch: Callable[[int], Operand]) -> tuple[Any, ...] | None:
        """The launch as a driver call, or None as long as its kernel is not compiled. `scratch`
        gives memory that each launch has anew.
        """
        if self._device is None:
            self._device = _device_of(step.tensors)
        if self._direct is None and self._is_compiled:
            self._use(_compiled.get(self._code_for(step.tensors, step.numbers)))
        if self._direct is None:
            return None
        x, y, z = (*step.grid, 1, 1)[:3]
        size = x * y * z * self._compiled.metadata.global_scratch_size
        given = (*step.tensors, *step.numbers, *self._fixed)
        if self._layout is None:
            names = self._kernel.arg_names
            self._layout = native_launch.layout_of(self.name, self._compiled, names, given)
        return native_launch.arguments(
            self._compiled, self._layout, step.grid, given, scratch(size) if size else None
        )


def launch_kernel(
    kernel, grid: tuple[int, ...], tile: Tile, tensors: Sequence, numbers: Sequence[int] = (),
    sizes: tuple[int, ...] = (), registers: int = 0, **constexprs,
) -> None:  # fmt: skip
    """Launch a kernel on the current stream of the tensors' device, or, given slots, add the launch
    to their program. `Launcher` says what the arguments are. There may be host tensor descriptors
    among `tensors`, but not the last.
    """
    # a launcher launches the code that was compiled for the first of its tensors
    kinds = (_device_of(tensors), *map(_kind, tensors))
    key = (id(kernel), tile, sizes, registers, kinds, *constexprs.items())
    if (launcher := _launchers.get(key)) is None:
        launcher = _launchers[key] = Launcher(kernel, tile, sizes, registers, **constexprs)
    if isinstance(slot := tensors[-1], Slot):
        slot.program.add(Launch(launcher, tensors, numbers, grid))
    else:
        launcher.launch(tensors, numbers, grid)


_launchers: LRUCache[tuple, Launcher] = LRUCache(4096)


def _kind(tensor) -> Any:
    """What Triton's code depends on of a tensor, a host descriptor or None."""
    if tensor is None:
        return None
    return getattr(tensor, "dtype", None) or (tensor.base.dtype, *tensor.block_shape)


def _sized(value: Any, parameter: Any) -> Any:
    """A number that Triton compiles the same for as for this one; other values as they are."""
    specialised = not parameter.do_not_specialize
    if isinstance(value, Operand) or (parameter.annotation_type and not specialised):
        return _ANY
    if type(value) is not int or (specialised and value == 1):
        return value
    least = 0 if -(1 << 31) <= value < 1 << 31 else 1 << 32
    return least + (16 if specialised and value % 16 == 0 else _ANY)


_ANY = 3


def _device_of(tensors: Sequence) -> int:
    """The number of the GPU; some tensors, such as pinned ones, may be on the host, no slots."""
    if isinstance(slot := tensors[-1], Slot):
        return _ON_HOST if slot.device.index is None else slot.device.index
    gpus = (one.device.index for one in tensors if getattr(one, "is_cuda", False))
    return next(gpus, _ON_HOST)


def _direct_launch(compiled) -> Callable[..., None] | None:
    """What Triton does with a compiled kernel in the end, without hooks; it takes the grid and all
    arguments, constexprs included. None for a version that may do something else.
    """
    if not runs_directly():
        return None
    run = compiled.run
    function, metadata = compiled.function, compiled.packed_metadata
    device = torch.cuda.current_device()
    stream = torch._C._cuda_getCurrentRawStream

    def launch(grid: tuple[int, ...], *args) -> None:
        x, y, z = (*grid, 1, 1)[:3]
        run(x, y, z, stream(device), function, metadata, None, None, None, *args)

    metas = getattr(compiled.metadata, "tensordesc_meta", None)
    if not metas or run_expands_descriptors():
        return launch
    behind = triton_private.launcher_behind(run)
    how = (run.launch_cooperative_grid, run.launch_pdl)
    scratch_bytes, alignment = run.global_scratch_size, run.global_scratch_align

    def launch_expanded(grid: tuple[int, ...], *args) -> None:
        x, y, z = (*grid, 1, 1)[:3]
        scratch = None  # where kernels make descriptors of their own
        if scratch_bytes:
            scratch = _descriptor_memory(x * y * z * scratch_bytes, alignment, None)
        before = (*how, scratch, None, metadata, None, None, None)
        flat: list = []
        for descriptor, meta in zip(args, metas, strict=False):  # descriptors come first
            flat += _expanded(descriptor, meta)
        behind(x, y, z, stream(device), function, *before, *flat, *args[len(metas) :])

    return launch_expanded


def _expanded(descriptor, meta) -> list:
    """What Triton 3.6 makes of a host descriptor at every launch; kept, because it takes 3 us."""
    if not hasattr(descriptor, "expanded"):
        descriptor.expanded = triton_private.described(descriptor, meta)
    return descriptor.expanded


def has_hooks() -> bool:
    """Whether somebody, such as a profiler, wants to see every launch."""
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
