"""The repaired interpreter computes bfloat16 as torch does; what is patched in Triton exists."""

from __future__ import annotations

import itertools
import types

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from interpreted_access import needs_interpreter
from triton.runtime import interpreter

from flux_megatron.kernels import interpreter_operators, interpreter_types
from flux_megatron.kernels.interpreter import bits_to_fp32, fp32_to_bits

pytestmark = needs_interpreter
SIZE = 32


@triton.jit
def compute(left, right, result, OPERATION: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x, y = tl.load(left + at), tl.load(right + at)
    if OPERATION == "dot":
        value = tl.dot(x, y).to(tl.bfloat16)
    elif OPERATION == "add":
        value = x + y
    elif OPERATION == "compare":
        value = tl.where(x > y, x, y)
    elif OPERATION == "equal":
        value = tl.where(x == y, x, y * 0)
    elif OPERATION == "constant":
        value = x * 2.0 + tl.full((SIZE, SIZE), 1.5, tl.bfloat16)
    elif OPERATION == "fma":
        value = tl.fma(x, y, x)
    elif OPERATION == "to_int":
        value = x.to(tl.int32).to(tl.bfloat16)
    elif OPERATION == "from_int":
        value = at.to(tl.bfloat16)
    elif OPERATION == "to_fp16":
        value = x.to(tl.float16).to(tl.bfloat16)
    elif OPERATION == "sum":
        value = tl.broadcast_to(tl.sum(x, 1)[:, None], (SIZE, SIZE))
    else:
        value = x.to(tl.float32) * y.to(tl.float32) + 1
    tl.store(result + at, value.to(tl.bfloat16))


@triton.jit
def cast(source, target, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(target + at, tl.load(source + at).to(target.dtype.element_ty))


TRUTH = {
    "dot": lambda x, y: (x.float() @ y.float()).bfloat16(),
    "add": lambda x, y: x + y,
    "compare": lambda x, y: torch.maximum(x, y),
    "equal": lambda x, y: torch.where(x == y, x, y * 0),
    "constant": lambda x, y: x * 2.0 + 1.5,
    "fma": lambda x, y: torch.addcmul(x.double(), x.double(), y.double()).bfloat16(),
    "to_int": lambda x, y: x.int().bfloat16(),
    "from_int": lambda x, y: torch.arange(SIZE * SIZE).view(SIZE, SIZE).bfloat16(),
    "to_fp16": lambda x, y: x.half().bfloat16(),
    "sum": lambda x, y: x.float().sum(1, keepdim=True).expand(SIZE, SIZE).bfloat16(),
    "fp32 between": lambda x, y: (x.float() * y.float() + 1).bfloat16(),
}


def _computed(operation: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    result = torch.full((SIZE, SIZE), float("nan"), dtype=torch.bfloat16)
    compute[(1,)](x, y, result, operation, SIZE)
    return result


@pytest.mark.parametrize("operation", TRUTH)
def test_bfloat16_is_torch_s(operation):
    random = torch.Generator().manual_seed(1)
    if operation in ("dot", "sum"):  # integers, whose sums do not depend on their order
        x, y = (torch.randint(-9, 10, (SIZE, SIZE), generator=random).bfloat16() for _ in "xy")
    else:
        x, y = (torch.randn(SIZE, SIZE, generator=random).bfloat16() * 4 for _ in "xy")
        y[::2] = x[::2]
    assert torch.equal(_computed(operation, x, y), TRUTH[operation](x, y))


def _fp32(*bits: int) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


SPECIAL = {
    "ties to even": _fp32(0x3F808000, 0x3F818000, 0xBF808000, 0xBF818000),
    "beside a tie": _fp32(0x3F808001, 0x3F807FFF, 0xBF808001, 0xBF807FFF),
    "overflow": _fp32(0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0xFF7FFFFF),
    "infinities and zeros": _fp32(0x7F800000, 0xFF800000, 0x00000000, 0x80000000),
    "subnormals": _fp32(0x00000001, 0x00008000, 0x00018000, 0x807FFFFF),
}


@pytest.mark.parametrize("values", SPECIAL.values(), ids=SPECIAL)
def test_cast_rounds_to_nearest_even(values):
    target = torch.zeros(4, dtype=torch.bfloat16)
    cast[(1,)](values, target, 4)
    assert torch.equal(target.view(torch.int16), values.bfloat16().view(torch.int16))


def test_nan_stays_nan():
    # rounded up as numbers, the last two would carry into the sign
    values = _fp32(0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF)
    target = torch.zeros(4, dtype=torch.bfloat16)
    cast[(1,)](values, target, 4)
    assert target.isnan().all()


def test_every_bfloat16_survives_a_round_trip():
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    bits = bits[~bits.isnan()]
    words = bits.view(torch.int16).numpy().view("uint16")
    assert (fp32_to_bits(bits_to_fp32(words)) == words).all()


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (interpreter, "TensorHandle InterpreterBuilder InterpretedFunction GridExecutor ReduceOps"),
        (interpreter, "interpreter_builder _get_np_dtype _implicit_cvt"),
        (interpreter, "_patch_lang _patch_lang_tensor"),
        (interpreter.InterpreterBuilder, "create_dot cast_impl binary_op create_fma"),
        (interpreter.InterpreterBuilder, "create_masked_load create_masked_store"),
        (interpreter.InterpreterBuilder, "create_atomic_rmw create_atomic_cas"),
        (interpreter.InterpreterBuilder, "set_grid_idx set_grid_dim"),
        (interpreter.InterpretedFunction, "run rewrite __call__"),
        (interpreter.GridExecutor, "_init_args_hst"),
        (interpreter.ReduceOps, "sum"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_private_names_exist(owner, names):
    """All of this is Triton's own business: a version that changes it must fail here first."""
    missing = [name for name in names.split() if not hasattr(owner, name)]
    assert not missing, f"Triton {triton.__version__}: {owner.__name__} has no {', '.join(missing)}"


def test_a_block_type_is_made_once_for_its_element_and_sizes():
    class BlockType:
        def __init__(self, element, shape):
            self.element, self.shape = element, list(shape)

    language = types.SimpleNamespace(block_type=BlockType, _unwrap_if_constexpr=int)
    interpreter_types._make_block_types_once(language)
    fp32, fp16 = (types.SimpleNamespace(name=name) for name in ("fp32", "fp16"))
    once = BlockType(fp32, [2, 4])
    assert BlockType(fp32, (2, 4)) is once
    assert (once.element, once.shape) == (fp32, [2, 4])
    for element, shape in ((fp32, [4, 2]), (fp16, [2, 4]), (fp32, [2])):
        other = BlockType(element, shape)
        assert (other.element, other.shape) == (element, shape)


class _Semantic:
    """Checks as Triton does: an int32 and a number fit, an int32 beside an int64 becomes one."""

    def __init__(self):
        self.checks = 0

    def binary_op_type_checking_impl(self, left, right, allow_pointers=False):
        self.checks += 1
        if type(right) is int:
            right = _Tensor(left.type.name, right)
        if left.type.name == "pointer" and not allow_pointers:
            raise TypeError("no pointer expected")
        if left.type.name == "int32" and right.type.name == "int64":
            left = _Tensor("int64", left.value)
        return left, right


class _Tensor:
    def __init__(self, type_name, value):
        self.type, self.value = types.SimpleNamespace(name=type_name), value


def test_operands_are_checked_once_for_their_types():
    class Semantic(_Semantic): ...

    interpreter_types.check_operands_once(Semantic, _Tensor)
    semantic = Semantic()

    def checked(left, right, *options):
        first, second = semantic.binary_op_type_checking_impl(left, right, *options)
        return (first.type.name, first.value), (second.type.name, second.value)

    short, long, pointer = _Tensor("int32", 1), _Tensor("int64", 2), _Tensor("pointer", 3)
    for value in (5, 6):
        operand = _Tensor("int32", value)
        assert checked(short, operand) == (("int32", 1), ("int32", value))
        assert checked(operand, long) == (("int64", value), ("int64", 2))
        assert checked(operand, 7) == (("int32", value), ("int32", 7))
        assert checked(long, 8) == (("int64", 2), ("int64", 8))
        assert checked(pointer, operand, True) == (("pointer", 3), ("int32", value))
        with pytest.raises(TypeError, match="no pointer"):
            checked(pointer, operand)
    assert checked(short, 9) == (("int32", 1), ("int32", 9))
    # every kind once, and twice what changes the first operand or is refused
    assert semantic.checks == 9


def _tensors(turn: int) -> list:
    """Numbers, rows, matrices and pointers; all are below zero in the second turn."""
    made = []
    for dtype in (tl.int1, tl.int32, tl.int64, tl.uint32, tl.float16, tl.bfloat16, tl.float32):
        for shape in ((1,), (4, 1), (1, 4), *[(4,)] * (dtype == tl.int32)):
            data = (np.arange(np.prod(shape)).reshape(shape) * 7 + 3 * turn) % 11 + 1 - 13 * turn
            data = np.where(dtype == tl.int1, data % 2, data)
            data = data.astype(interpreter._get_np_dtype(dtype))
            kind = dtype if shape == (1,) else tl.block_type(dtype, list(shape))
            made.append(tl.tensor(interpreter.TensorHandle(data, dtype), kind))
    pointer = tl.pointer_type(tl.float32)
    data = np.array([1 << 40], dtype=np.uint64) + np.uint64(turn)
    return [*made, tl.tensor(interpreter.TensorHandle(data, pointer), pointer)]


def _answer(operate, *operands):
    try:
        result = operate(*operands)
    except Exception as error:
        return type(error)
    data = result.handle.data
    shape = [int(getattr(size, "value", size)) for size in result.shape]
    return str(result.type), data.dtype, data.shape, data.tobytes(), str(result.dtype), shape


@pytest.fixture
def operators():
    """Ours and Triton's, by name."""
    made = interpreter_operators.Operators(interpreter)
    both = {name: (ours, made._original(name)) for _, name, ours in made.changes}
    replaced = interpreter._patch_lang(None)
    yield both
    replaced.restore()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_operators_answer_as_triton_s_do(operators):
    asked = 0
    for name, (operate, original) in operators.items():
        for turn in range(2):
            values = _tensors(turn)
            for left, right in itertools.product(values, [*values, 3, -2, 1 << 40, 2.5]):
                asked += 1
                ours, theirs = _answer(operate, left, right), _answer(original, left, right)
                assert ours == theirs, (name, str(left.type), str(getattr(right, "type", right)))
    assert asked > 15_000


def test_most_operators_are_numpy_s(operators, monkeypatch):
    """Triton's is asked once for two types."""
    long, short = (next(v for v in _tensors(0) if v.type == t) for t in (tl.int64, tl.int32))
    for name in ("__add__", "__lt__", "__floordiv__"):
        operate, _ = operators[name]
        first = operate(long, short)
        with monkeypatch.context() as patch:
            patch.setattr(interpreter.InterpreterBuilder, "binary_op", None)
            patch.setattr(interpreter.InterpreterBuilder, "create_idiv", None)
            assert operate(long, short).handle.data == first.handle.data
