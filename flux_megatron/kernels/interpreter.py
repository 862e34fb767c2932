"""Triton's interpreter for our kernels: chosen where there is no GPU, with repaired bfloat16 and
less overhead.

The interpreter (Triton 3.6 to 3.7.1) keeps bfloat16 as 16-bit integers and computes on those bits.
Here arithmetic on bfloat16 goes through fp32 and rounds to nearest even, as compiled code does.
Casts to fp8 and bfloat16 atomics stay broken; our kernels do not use them. Dots of fp8 are right.

It also spends most of its time on repeated work, which these patches remove (triton 3.7.1). Every
call of a device function replaces the language again. Every operation makes its types
(`interpreter_types`) and derives the common type of its operands (`interpreter_operators`).
"""

from __future__ import annotations

import inspect
import os
import sys
from functools import lru_cache
from importlib.util import find_spec
from types import SimpleNamespace

from flux_megatron.kernels.interpreter_types import make_types_once


def prepare() -> None:
    """Choose the interpreter on a machine without a GPU, and repair it where it is chosen.

    Triton decides at its first import, so call this before. `supports` of the kernels gives the
    reason if triton was imported first, or if there is no numpy for its interpreter: then even the
    import of a triton that is told to interpret would fail.
    """
    import torch

    # `is_available` begins CUDA, whose GPUs are then those that CUDA_VISIBLE_DEVICES names now: Ray
    # names a worker's later.
    if "triton" not in sys.modules and not torch.cuda.device_count():
        if find_spec("numpy") is None:
            os.environ.pop("TRITON_INTERPRET", None)
        else:
            os.environ.setdefault("TRITON_INTERPRET", "1")
    if triton_interprets():
        repair()


def triton_interprets() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


def refuses() -> str | None:
    """Why kernels are not interpreted in this process, so that CPU tensors cannot be taken."""
    if triton_interprets():
        return None
    if find_spec("numpy") is None:
        return "CPU tensors need numpy, in which Triton's interpreter is written"
    return "CPU tensors need TRITON_INTERPRET=1, set before triton is imported"


@lru_cache(maxsize=1)
def repair() -> None:
    """Replace the interpreter's bfloat16 operations and its slow parts, once a process."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    handle = interpreter.TensorHandle
    builder = interpreter.InterpreterBuilder
    dot, cast, binary, fma = (
        builder.create_dot, builder.cast_impl, builder.binary_op, builder.create_fma
    )  # fmt: skip

    def is_bf16(value) -> bool:
        return value.dtype.scalar == tl.bfloat16

    def widened(value):
        return handle(bits_to_fp32(value.data), tl.float32) if is_bf16(value) else value

    def rounded(values):
        return handle(fp32_to_bits(values), tl.bfloat16)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        if a.dtype.scalar.primitive_bitwidth == 16 and d.data.dtype == np.float32:
            # converted first: numpy uses BLAS only for fp32 and fp64
            left, right = (widened(operand).data.astype(np.float32) for operand in (a, b))
            return handle(np.matmul(left, right) + d.data, d.dtype.scalar)
        return dot(self, a, b, d, input_precision, max_num_imprecise_acc)

    def cast_impl(self, source, target):
        origin, goal = source.dtype.scalar, target.scalar
        if origin == goal or tl.bfloat16 not in (origin, goal):
            return cast(self, source, target)
        if goal == tl.bfloat16:
            return rounded(source.data.astype(np.float32))
        return handle(bits_to_fp32(source.data).astype(interpreter._get_np_dtype(target)), goal)

    def binary_op(self, left, right, operation):
        if not is_bf16(left):
            return binary(self, left, right, operation)
        result = operation(widened(left).data, widened(right).data)
        return handle(result, tl.int1) if result.dtype == np.bool_ else rounded(result)

    def create_fma(self, x, y, z):
        if not is_bf16(z):
            return fma(self, x, y, z)
        return rounded(fma(self, widened(x), widened(y), widened(z)).data)

    builder.create_dot, builder.cast_impl = create_dot, cast_impl
    builder.binary_op, builder.create_fma = binary_op, create_fma
    builder.get_bf16 = lambda self, value: rounded(np.array([value], dtype=np.float32))
    _repair_sum(interpreter, rounded)
    _repair_index(interpreter)
    _replace_language_once_a_launch(interpreter)
    _read_signatures_once(interpreter)
    make_types_once(interpreter)


def bits_to_fp32(bits):
    """bfloat16 bit patterns (uint16) to fp32, exactly."""
    import numpy as np

    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def fp32_to_bits(values):
    """fp32 to bfloat16 bit patterns, to nearest, ties to even; NaN stays NaN."""
    import numpy as np

    word = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).reshape(np.shape(values))
    nearest = word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))
    bits = (nearest >> np.uint32(16)).astype(np.uint16)
    is_nan = (word & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, np.uint16(0x7FC0), bits)


def _repair_sum(interpreter, rounded) -> None:
    import numpy as np
    import triton.language as tl

    original = interpreter.ReduceOps.sum

    def total(self, value):
        if value.dtype.scalar != tl.bfloat16:
            return original(self, value)
        wide = bits_to_fp32(value.handle.data)
        return self.to_tensor(
            rounded(np.sum(wide, axis=self.axis, keepdims=self.keep_dims)).data, value.dtype
        )

    interpreter.ReduceOps.sum = total


def _repair_index(interpreter) -> None:
    """Triton 3.6 with numpy >= 2.4: `range` over a runtime bound needs a zero-dimensional array."""
    if "squeeze" in inspect.getsource(interpreter._patch_lang_tensor):
        return
    original = interpreter._patch_lang_tensor

    def patch_tensor(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch_tensor


def _replace_language_once_a_launch(interpreter) -> None:
    """Replace the language in all modules at the launch, so device functions need not."""
    import triton.language as tl

    from flux_megatron.kernels.interpreter_operators import Operators, Replacement

    replace_language = interpreter._patch_lang
    modules = SimpleNamespace(__globals__={"language": tl, "core": tl.core})
    debug = interpreter.interpreter_builder.options.debug
    replacement = Replacement(
        lambda: replace_language(modules), [] if debug else Operators(interpreter).changes
    )
    interpreter._patch_lang = lambda function: replacement.begin()
    interpreter.InterpretedFunction.__call__ = _called


def _called(function, *args, **kwargs):
    """A device function's rewritten code."""
    return function.rewrite()(*args, **kwargs)


def _read_signatures_once(interpreter) -> None:
    """Of a kernel and of the types of its arguments, which Triton reads at every launch."""
    import triton.language as tl

    original = interpreter.inspect
    if hasattr(original, "signatures_are_kept"):  # by another copy of this package
        return
    signature = lru_cache(maxsize=None)(original.getfullargspec)

    def getcallargs(function, *positional, **named):
        given = dict(zip(signature(function).args, positional, strict=False)) | named
        if len(given) == len(positional) + len(named) == len(signature(function).args):
            return given
        return original.getcallargs(function, *positional, **named)

    replaced = {"getfullargspec": signature, "getcallargs": getcallargs}
    interpreter.inspect = SimpleNamespace(
        **{**vars(original), **replaced, "signatures_are_kept": True}
    )
    tl.str_to_ty = lru_cache(maxsize=None)(tl.str_to_ty)
