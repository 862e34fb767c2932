"""Operators of the interpreter's tensors: the common type of two operand types is derived once.

Triton derives it for every operation: some 40 us, where numpy takes 1 us for the operation itself
(triton 3.7.1, one CPU core, 2026-11-22). Here Triton's operator computes the first result of two
types. If numpy alone gives the same result, numpy computes the later ones of these types.
Otherwise, and for types that are not listed here, such as bfloat16, Triton's operator goes on.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

COMPARE = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")
COMPUTE = ("__add__", "__sub__", "__mul__")
REFLECTED = {"__radd__": "__add__", "__rsub__": "__sub__", "__rmul__": "__mul__"}
OF_INTEGERS = ("__floordiv__", "__mod__")
OF_BITS = ("__and__", "__or__")


def _on_arrays(name: str) -> Callable[[Any, Any], Any]:
    """The operator on two numpy arrays of one dtype."""
    import numpy as np

    if name == "__floordiv__":
        return lambda left, right: (left - np.fmod(left, right)) // right  # towards zero
    if name == "__mod__":
        return np.fmod
    if name in REFLECTED:
        of = getattr(operator, REFLECTED[name])
        return lambda left, right: of(right, left)
    return getattr(operator, name)


class Answer(NamedTuple):
    """The result of an operator for two types: its type, and the function of both operands."""

    of: Callable[[Any, Any], Any]
    type: Any
    shape: Any
    numel: Any


class Operators:
    """`changes`: attributes that the tensor class gets while kernels are interpreted."""

    def __init__(self, interpreter: Any) -> None:
        import triton.language.core as language

        self._interpreter, self._language = interpreter, language
        self._tensor, self._handle = language.tensor, interpreter.TensorHandle
        self.changes = [
            (self._tensor, name, self._operator(name))
            for name in (*COMPARE, *COMPUTE, *REFLECTED, *OF_INTEGERS, *OF_BITS)
        ]

    def _original(self, name: str) -> Callable[..., Any]:
        member, semantic = getattr(self._tensor, name), self._interpreter.interpreter_semantic
        return lambda *operands, **named: member(*operands, **{**named, "_semantic": semantic})

    def _operator(self, name: str) -> Callable[[Any, Any], Any]:
        original, known = self._original(name), {}
        tensor, constexpr, made = self._tensor, self._language.constexpr, self._made

        def operate(left: Any, right: Any) -> Any:
            kind = type(right)
            if kind is constexpr:
                right = right.value
                kind = type(right)
            if kind is tensor:
                key = (left.type.name, right.type.name)
            elif kind is int:
                key = (left.type.name, right)
            else:
                return original(left, right)
            answer = known.get(key)
            if answer is None:
                if key in known:
                    return original(left, right)
                result = original(left, right)
                known[key] = self._learned(name, left, right, result)
                return result
            return made(answer, answer.of(left.handle, right))

        return operate

    def _made(self, answer: Answer, data: Any) -> Any:
        """The tensor of `data`; the first result of these types has been checked."""
        handle, result = object.__new__(self._handle), object.__new__(self._tensor)
        type, dtype = answer.type, answer.type.scalar
        handle.data, handle.dtype, handle.attr = data, dtype, {}
        result.handle, result.type, result.dtype = handle, type, dtype
        result.shape, result.numel = answer.shape, answer.numel
        return result

    def _learned(self, name: str, left: Any, right: Any, result: Any) -> Answer | None:
        """The answer for operands of these types, or None if Triton has to compute each of them."""
        scalar = left.type.scalar
        if scalar.is_ptr():
            return self._moved_pointer(name, left, right, result)
        numbers = [scalar] if type(right) is int else [scalar, right.type.scalar]
        integers = all(self._is_number(type) for type in numbers)
        bits = name in OF_BITS and all(type.is_int1() for type in numbers)
        floats = name in (*COMPARE, *COMPUTE, *REFLECTED) and type(right) is not int
        floats &= all(type.is_fp16() or type.is_fp32() or type.is_fp64() for type in numbers)
        if not (integers or bits or floats):
            return None
        common = result
        if name in COMPARE:
            semantic = self._interpreter.interpreter_semantic
            common, _ = semantic.binary_op_type_checking_impl(left, semantic.to_tensor(right))
        of, dtype = _on_arrays(name), self._interpreter._get_np_dtype(common.type)

        def with_number(handle: Any, _: int) -> Any:
            return of(handle.data.astype(dtype, copy=False), number)

        def with_tensor(handle: Any, other: Any) -> Any:
            data = other.handle.data.astype(dtype, copy=False)
            return of(handle.data.astype(dtype, copy=False), data)

        if type(right) is int:
            number = _array(right).astype(dtype)
            return self._checked(with_number, left, right, result)
        return self._checked(with_tensor, left, right, result)

    def _moved_pointer(self, name: str, left: Any, right: Any, result: Any) -> Answer | None:
        if name != "__add__" or not (type(right) is int or self._is_number(right.type.scalar)):
            return None
        size_bytes = max(1, left.type.scalar.element_ty.primitive_bitwidth // 8)

        def by_number(handle: Any, _: int) -> Any:
            return handle.data + far

        def by_tensor(handle: Any, offset: Any) -> Any:
            return handle.data + size_bytes * offset.handle.data.astype("uint64")

        if type(right) is int:
            far = size_bytes * _array(right).astype("uint64")
            return self._checked(by_number, left, right, result)
        return self._checked(by_tensor, left, right, result)

    def _checked(
        self, of: Callable[[Any, Any], Any], left: Any, right: Any, result: Any
    ) -> Answer | None:
        ours, theirs = of(left.handle, right), result.handle.data
        same = (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        if not same or ours.tobytes() != theirs.tobytes():
            return None
        return Answer(of, result.type, result.shape, result.numel)

    @staticmethod
    def _is_number(type: Any) -> bool:
        return type.is_int() and not type.is_int1()


def _array(number: int) -> Any:
    import numpy as np

    return np.array([number])


class Replacement:
    """The language of interpreted kernels: `begin` installs it, the last `restore` removes it.

    Triton collects the changes for every launch; here `replace` collects them once.
    """

    def __init__(self, replace: Callable[[], Any], more: list[tuple[Any, str, Any]]) -> None:
        self._replace, self._more, self._begun = replace, more, 0
        self._changes: list[tuple[Any, str, Any]] = []
        self._before: list[tuple[Any, str, Any]] = []

    def begin(self) -> Replacement:
        self._begun += 1
        if self._begun == 1:
            if not self._changes:
                self._find()
            for owner, name, value in self._changes:
                setattr(owner, name, value)
        return self

    def restore(self) -> None:
        self._begun -= 1
        if not self._begun:
            for owner, name, value in self._before:
                if value is _MISSING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, value)

    def _find(self) -> None:
        scope = self._replace()
        changed = {(id(owner), name): (owner, name) for owner, name, _ in scope._changes}
        values = {key: (*place, getattr(*place)) for key, place in changed.items()}
        scope.restore()
        values |= {(id(owner), name): (owner, name, value) for owner, name, value in self._more}
        self._changes = list(values.values())
        self._before = [
            (owner, name, getattr(owner, name, _MISSING)) for owner, name, _ in self._changes
        ]


_MISSING = object()
