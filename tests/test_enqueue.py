"""The copy engine of GPUs and lists of driver calls, on a driver that notes what is done: what C
enqueues is what Python's engine enqueues, in its order.
"""

from __future__ import annotations

import ctypes
import struct
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import fake_engines
import pytest
import torch
from fake_engines import CALLERS, NEEDS, STREAM, engine

from flux_megatron import settings
from flux_megatron.symm import device as devices
from flux_megatron.symm import enqueue
from flux_megatron.symm.cuda_backend import CudaCopyEngine
from flux_megatron.symm.enqueue import EPOCHS, Operand, X, always

pytest_plugins = ("fake_engines",)
pytestmark = NEEDS

EPOCH, SOURCE = EPOCHS[0], X  # registers that every list is given
NUMBERS = {EPOCH.register: 0, SOURCE.register: 50}


def moves(*given: tuple) -> list[tuple[str, tuple[Operand, ...]]]:
    """Methods of an engine and what they are given."""
    return [
        (method, tuple(one if isinstance(one, Operand) else always(one) for one in operands))
        for method, *operands in given
    ]


PUSHES = [(("copy", 1000 + 64 * n, SOURCE.plus(16 * n), 8 + n), ("signal", 2000 + 4 * n, EPOCH))
          for n in range(3)]  # fmt: skip
GATED = [("wait_count", 100 + 4 * n, 3 + n) for n in range(3)]
USES = {
    "fork and join": moves(("fork",), ("join",)),
    "pushes": moves(*[one for push in PUSHES for one in push]),
    "parts of rows": moves(
        ("copy_rows", 1000, SOURCE, 8, 3, 64), PUSHES[0][1], ("copy_rows", 2000, SOURCE, 9, 2, 32),
        *PUSHES[1],
    ),
    "a copy in the caller's stream": moves(("copy_here", 60, 70, 9)),
    "gated pushes": moves(
        *[one for gate, push in zip(GATED, PUSHES, strict=True) for one in (gate, *push)],
        *[("write", 100 + 4 * n, 0) for n in range(3)],
    ),
    "more words than one batch takes": moves(*[("write", 4 * n, n) for n in range(150)]),
}  # fmt: skip


def listed(engine: CudaCopyEngine, used: list) -> Any:
    made = enqueue.native().List(0, 1)
    made.add([one for method, given in used
              for one in engine.list_streams.operations(method, *given)])  # fmt: skip
    return made


def run(made: Any, epoch: int = 1) -> bool:
    return made.run(bytes(8), CALLERS, epoch, 0, 50)


@pytest.mark.parametrize("epoch", fake_engines.EPOCHS)
def test_what_comes_to_the_copy_stream(driver, epoch):
    made = engine()
    made.wait_count(100, 3)
    made.copy(1000, 50, 8)
    made.signal(2000, epoch)
    made.write(100, 0)
    made.fork()
    made.join()
    copied = [("wait", 100, 3, 0), ("copy", 1000, 50, 8), ("write", 2000, epoch % 2**32, 0)]
    orders = [("record", CALLERS), ("follow", STREAM), ("record", STREAM), ("follow", CALLERS)]
    *done, _, _, _, _ = every = [*driver.done()]
    assert done == [(what, STREAM, *given) for what, *given in [*copied, ("write", 100, 0, 0)]]
    assert [one[:2] for one in every[4:]] == orders


def test_a_refusal_of_the_driver_is_an_error(driver):
    driver.refuse(0, code=1)
    with pytest.raises(RuntimeError, match="cuStreamWriteValue32 failed: 1"):
        engine().signal(2000, 1)


@pytest.mark.parametrize("epoch", fake_engines.EPOCHS)
@pytest.mark.parametrize("use", USES)
def test_c_enqueues_what_python_does(driver, use, epoch):
    by_python = engine()
    for method, given in USES[use]:
        held = NUMBERS | {EPOCH.register: epoch}
        getattr(by_python, method)(*[held.get(one.register, 0) + one.add for one in given])
    expected = [*driver.done()]
    assert run(listed(by_python, USES[use]), epoch)
    assert [*driver.done()] == expected
    assert expected


@pytest.mark.parametrize(
    ("number", "call", "operation"),
    [(0, "cuStreamWaitValue32", 1), (1, "cuMemcpyDtoDAsync", 2), (2, "cuStreamBatchMemOp", 3),
     (4, "cuMemcpyDtoDAsync", 5)],
)  # fmt: skip
def test_a_refusal_names_call_code_and_operation(driver, number, call, operation):
    driver.refuse(number, 719)
    with pytest.raises(RuntimeError, match=rf"^{call} failed: 719 \(operation {operation} of 12\)"):
        run(listed(engine(), USES["gated pushes"]))
    assert len([*driver.done()]) == number, "nothing comes after it"


def test_a_list_refuses_a_table_of_another_size(driver):
    made = enqueue.native().List(0, 2)
    with pytest.raises(ValueError, match="1 registers, a table of 8 bytes given"):
        made.run(bytes(8))
    with pytest.raises(ValueError, match="a table of 513 words given"):
        enqueue.native().List(0, 513)


def test_a_list_refuses_registers_and_places_that_a_run_has_not(driver):
    made = enqueue.native().List(0, 2)
    for register in (enqueue.TABLE + 2, -1):
        with pytest.raises(IndexError, match=f"register {register} given, 0 to 17 expected"):
            made.add([(enqueue.WRITE, enqueue.STREAM, (register, 0), always(1))])
    kernel = (0, (1, 1, 1), 32, 0, 12)
    for how, at, value, error, said in [
        (0, 12, 1, IndexError, "parameter 0 at 12 given"),
        (1, 8, X, IndexError, "parameter 0 at 8 given"),
        (2, 0, (*X, 1, 1), IndexError, "parameter 0 at 0 given"),
        (3, 0, 1, IndexError, "parameter 0 at 0 given"),
        (0, -1, 1, IndexError, "parameter 0 at -1 given"),
        (0, 8, Operand(enqueue.TABLE + 2), IndexError, "register 18 given"),
        (0, 8, None, TypeError, "None given"),
    ]:
        with pytest.raises(error, match=said):
            made.launch(enqueue.STREAM, *kernel, struct.pack("7i", how, at, *[0] * 5), [value])
    with pytest.raises(ValueError, match="2 values given for 28 bytes"):
        made.launch(enqueue.STREAM, *kernel, bytes(28), [1, 1])
    made = enqueue.native().List(0, 1)
    made.add([(enqueue.WRITE, enqueue.STREAM, X, always(1))])
    with pytest.raises(ValueError, match=r"4 registers, .* more than 4 and 8 bytes expected"):
        made.run(bytes(8), 1, 2, 3)


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_list_uses_its_device_s_context_and_puts_back_the_thread_s(driver, before):
    """0 is that of a new thread. A refusal puts it back too."""
    made = enqueue.native().List(1, 0)
    made.add([(enqueue.RECORD, enqueue.STREAM, always(0))] * 2)
    made.make_eager()
    driver.context = before
    try:
        assert made.run(b"", STREAM), "it was asked for a capture of its device"
        assert driver.word("fake_used", ctypes.c_uint64).value == 2
        assert driver.context == before
        driver.refuse(3, 719)
        with pytest.raises(RuntimeError, match="719"):
            made.run(b"", STREAM)
        assert driver.context == before
    finally:
        driver.context = 1


def test_a_list_of_a_device_that_there_is_not(driver):
    with pytest.raises(RuntimeError, match="cuDevicePrimaryCtxRetain failed: 101"):
        enqueue.native().List(8, 0)


def test_an_engine_of_another_device_asks_the_driver_for_a_capture(driver, monkeypatch):
    """torch knows of the current device's stream alone."""
    by_python = engine()
    asked = mock.Mock(return_value=(0, 1, 5))
    monkeypatch.setattr(driver, "cuStreamGetCaptureInfo", asked, raising=False)
    assert by_python.capture(CALLERS) == 0
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert by_python.capture(CALLERS) == 5
    asked.assert_called_once_with(CALLERS)


def test_without_a_compiler_python_makes_the_calls_and_says_so(driver, monkeypatch):
    monkeypatch.setattr(enqueue, "DRIVER", "no_such_library.so")
    monkeypatch.setenv("FLUX_MEGATRON_NATIVE", "0")
    settings.reload()
    device = torch.device("cuda", 0)
    with warnings.catch_warnings(action="error"):
        assert not devices._engine(device).runs_lists, "wanted"
    monkeypatch.setenv("FLUX_MEGATRON_NATIVE", "1")
    settings.reload()
    enqueue.unavailable.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"Python makes the driver calls.*no_such_library"):
            assert not devices._engine(device).runs_lists
    finally:
        enqueue.unavailable.cache_clear()


def test_an_engines_stream_is_current_within_and_nothing_is_other_behind(driver, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", lambda *given, **options: OF_SECOND_GPU)
    seen: list[object] = []
    for name, function in {
        "_cuda_getCurrentStream": lambda index: (5, index, 1),
        "_cuda_setStream": lambda **given: seen.append(tuple(given.values())),
    }.items():
        monkeypatch.setattr(torch._C, name, function, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", seen.append)
    own, before = (7, 1, 1), (5, 1, 1)
    for device, behind in ((1, [before]), (0, [before, 0])):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        with engine().stream():
            assert seen == [own]
        assert seen == [own, *behind]
        seen.clear()


OF_SECOND_GPU = SimpleNamespace(cuda_stream=STREAM, stream_id=7, device_index=1, device_type=1)
BROKEN = {
    "a batch lacks its last": ("(stream, count, given, 0)", "(stream, count - 1, given, 0)"),
    "a wait's address is the word": ("ess = value_of(first[i].a", "ess = value_of(first[i].b"),
    "rows are copied without their pitch": ("h = value_of(one->pitch", "h = value_of(one->c"),
    "the first operation is left out": ("int at = 0,", "int at = 1,"),
    "an error is passed over": ("if ((code = words > 1", "if (0 && (code = words > 1"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_c_would_be_noticed(driver, fault, monkeypatch, tmp_path):
    right, wrong = BROKEN[fault]
    source = Path(enqueue.__file__).with_suffix(".c").read_text()
    assert source.count(right) == 1
    (tmp_path / "enqueue.c").write_text(source.replace(right, wrong))
    monkeypatch.setattr(enqueue, "__file__", str(tmp_path / "enqueue.py"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def noticing() -> None:
        test_c_enqueues_what_python_does(driver, "gated pushes", 1)
        test_c_enqueues_what_python_does(driver, "parts of rows", 1)
        test_a_refusal_names_call_code_and_operation(driver, 1, "cuMemcpyDtoDAsync", 2)

    with pytest.raises((AssertionError, pytest.fail.Exception)):
        noticing()
