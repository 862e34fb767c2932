"""Lists of driver calls, on a driver that notes what is done: what C enqueues is what Python's
engine enqueues, in its order.
"""

from __future__ import annotations

import ctypes
import warnings
from pathlib import Path

import pytest
import torch
from fake_engines import BOXES, CALLERS, EPOCHS, GATED_PUSHES, NEEDS, OTHER, PUSHES, STREAM, engines

from flux_megatron import settings
from flux_megatron.symm import enqueue, native_engine
from flux_megatron.symm.cuda_backend import CudaCopyEngine

pytest_plugins = ("fake_engines",)
pytestmark = NEEDS

USES = {
    "fork and join": lambda engine, epoch: (engine.fork(), engine.join()),
    "order": lambda engine, epoch: engine.order(OTHER, CALLERS),
    "send": lambda engine, epoch: engine.send(PUSHES, 50, epoch),
    "send parts of rows": lambda engine, epoch: engine.send((*BOXES, *PUSHES), 50, epoch),
    "a part of rows": lambda engine, epoch: engine.copy_rows(1000, 50, 8, 3, 64),
    "a push and its signal": lambda engine, epoch: (
        engine.copy(1000, 50, 8), engine.write(2000, epoch), engine.copy_here(60, 70, 9)
    ),
    "gated pushes": lambda engine, epoch: engine.push_gated(GATED_PUSHES, 50, epoch),
    "one gated push": lambda engine, epoch: engine.push_gated(GATED_PUSHES[:1], 50, epoch),
    "a wait": lambda engine, epoch: (engine.wait_count(100, 7), engine.clear((100, 104))),
}  # fmt: skip


@pytest.mark.parametrize("epoch", EPOCHS)
@pytest.mark.parametrize("use", USES)
def test_c_enqueues_what_python_does(driver, use, epoch):
    by_python, by_c = engines()
    for _ in range(2):  # the second time what was kept of the first is used
        USES[use](by_python, epoch)
        expected = [*driver.done()]
        USES[use](by_c, epoch)
        assert [*driver.done()] == expected
    assert expected


def test_every_push_comes_before_its_signal(driver):
    _, engine = engines()
    engine.send(PUSHES, 50, 3)
    expected = [
        one
        for push in PUSHES
        for one in (
            ("copy", STREAM, push.destination, 50 + push.offset, push.size_bytes),
            ("write", STREAM, push.signal, 3, 0),
        )
    ]
    assert [*driver.done()] == expected


@pytest.mark.parametrize(
    ("number", "call", "operation"),
    [(0, "cuStreamWaitValue32", 1), (1, "cuMemcpyDtoDAsync", 2), (2, "cuStreamBatchMemOp", 3),
     (4, "cuMemcpyDtoDAsync", 6)],
)  # fmt: skip
def test_a_refusal_names_call_code_and_operation(driver, number, call, operation):
    _, engine = engines()
    driver.refuse(number, 719)
    with pytest.raises(RuntimeError, match=rf"^{call} failed: 719 \(operation {operation} of 15\)"):
        engine.push_gated(GATED_PUSHES, 50, 1)
    assert len([*driver.done()]) == number, "nothing comes after it"


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_list_uses_its_device_s_context_and_puts_back_the_thread_s(driver, before):
    """0 is that of a new thread. A refusal puts it back too."""
    made = enqueue.listed([enqueue.Operation(enqueue.WRITE, enqueue.STREAM)] * 2, 1)
    made.require(True, 0)
    driver.context = before
    try:
        assert made.run(STREAM), "it was asked for a capture of its device"
        assert driver.word("fake_used", ctypes.c_uint64).value == 2
        assert driver.context == before
        driver.refuse(3, 719)
        with pytest.raises(RuntimeError, match="719"):
            made.run(STREAM)
        assert driver.context == before
    finally:
        driver.context = 1


def test_a_list_of_a_device_that_there_is_not(driver):
    with pytest.raises(RuntimeError, match="cuDevicePrimaryCtxRetain failed: 101"):
        enqueue.listed([], 8)


def test_an_engine_of_another_device_asks_the_driver_for_a_capture(driver, monkeypatch):
    """torch knows of the current device's stream alone."""
    by_python, _ = engines()
    asked = []

    def info(stream: int) -> tuple[int, int, int]:
        asked.append(stream)
        return 0, 1, 5

    monkeypatch.setattr(driver, "cuStreamGetCaptureInfo", info, raising=False)
    assert by_python.capture(CALLERS) == 0
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert by_python.capture(CALLERS) == 5
    assert asked == [CALLERS]


def test_without_a_compiler_python_makes_the_calls_and_says_so(driver, monkeypatch):
    monkeypatch.setattr(enqueue, "DRIVER", "no_such_library.so")
    monkeypatch.setenv("FLUX_MEGATRON_NATIVE", "0")
    settings.reload()
    with warnings.catch_warnings(action="error"):
        assert type(native_engine.engine(torch.device("cuda", 0))) is CudaCopyEngine, "wanted"
    monkeypatch.setenv("FLUX_MEGATRON_NATIVE", "1")
    settings.reload()
    native_engine.unavailable.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"Python makes the driver calls.*no_such_library"):
            made = native_engine.engine(torch.device("cuda", 0))
    finally:
        native_engine.unavailable.cache_clear()
    assert type(made) is CudaCopyEngine


BROKEN = {
    "a batch lacks its last": (", count, given, 0)", ", count - 1, given, 0)"),
    "a wait's address is the word": (
        "address = value_of(first[i].a",
        "address = value_of(first[i].b",
    ),
    "rows are copied without their pitch": (
        "size_t pitch = value_of(one[1].b",
        "size_t pitch = value_of(one->c",
    ),
    "the first operation is left out": ("int at = 0,", "int at = 1,"),
    "an error is passed over": ("if ((code = run_one", "if (0 && (code = run_one"),
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
        test_c_enqueues_what_python_does(driver, "send parts of rows", 1)
        test_a_refusal_names_call_code_and_operation(driver, 1, "cuMemcpyDtoDAsync", 2)

    with pytest.raises((AssertionError, pytest.fail.Exception)):
        noticing()
