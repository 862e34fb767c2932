"""When a launcher goes past Triton's own launch. A compiled kernel stands in; GPUs run the rest."""

import json
import re
import struct
import threading
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from started import python

from flux_megatron.kernels import triton_launch, triton_private
from flux_megatron.kernels.launch import has_whole_units
from flux_megatron.problem import Tile


class Kernel:
    __name__ = "stand_in_kernel"

    def __init__(self) -> None:
        self.arg_names = ["x", "rank", "N", "GROUP_M"]
        self.params = [
            SimpleNamespace(
                do_not_specialize=name == "rank", is_constexpr=name == "GROUP_M", annotation_type=""
            )
            for name in self.arg_names
        ]
        self.runs: list[tuple] = []
        # what Triton keeps of a kernel, as far as a direct launch reads it
        self.compiled = SimpleNamespace(
            function="function", packed_metadata="packed",
            run=lambda *given: self.runs.append(given),
            metadata=SimpleNamespace(tensordesc_meta=None),
        )  # fmt: skip
        self.devices: list[int] = []  # of Triton's launches

    def __getitem__(self, grid):
        def launch(*given, num_warps: int, num_stages: int) -> SimpleNamespace:
            self.devices.append(torch.cuda.current_device())
            return self.compiled

        return launch


@pytest.fixture
def kernel(monkeypatch) -> Kernel:
    monkeypatch.setattr(triton_launch, "_compiled", {})
    monkeypatch.setattr(triton_launch, "runs_directly", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    return Kernel()


def launcher(kernel: Kernel) -> triton_launch.Launcher:
    return triton_launch.Launcher(kernel, Tile(group_m=5), (64,))


def at(address: int) -> SimpleNamespace:
    return SimpleNamespace(data_ptr=lambda: address, dtype="bf16")


def test_launches_with_whole_addresses_are_direct_but_the_first(kernel):
    run = launcher(kernel)
    triton_launch.launches.clear()
    for address in (32, 48, 64):
        run.launch([at(address)], (1,), (3,))
    assert len(kernel.devices) == 1
    assert triton_launch.launches == {"stand_in": 3}
    assert kernel.runs == [
        (3, 1, 1, 7, "function", "packed", None, None, None, address, 1, 64, 5)
        for address in (48, 64)
    ]


def test_launches_are_noted_in_one_thread_and_run_in_the_others(kernel):
    run = launcher(kernel)
    with triton_launch.noted() as codes:
        run.launch([at(32)], (1,), (3,))
        others = threading.Thread(target=run.launch, args=([at(48)], (1,), (3,)))
        others.start()
        others.join()
        assert len(kernel.devices) == 1, "the other thread's ran"
    assert [code.arguments for code in codes] == [("bf16", 3, 16, 5)]
    run.launch([at(64)], (1,), (3,))
    assert [len(codes), len(kernel.runs)] == [1, 1]


def test_a_launch_is_on_the_device_of_its_tensors(kernel, monkeypatch):
    """Whatever the current one is; tensors of the host, as pinned ones, do not count."""
    current, streams = [0], []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", streams.append, raising=False)

    @contextmanager
    def device(index: int):
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    on_host = SimpleNamespace(data_ptr=lambda: 16, is_cuda=False, dtype="bf16")
    on_gpu = SimpleNamespace(
        data_ptr=lambda: 32, is_cuda=True, device=torch.device("cuda", 2), dtype="bf16"
    )
    kernel.params.append(kernel.params[0])
    run = launcher(kernel)
    for _ in range(3):
        run.launch([on_host, on_gpu], (1,), (3,))
    assert (kernel.devices, streams, current) == ([2], [2, 2], [0])


@pytest.mark.parametrize("first", [8, 32])
def test_launches_with_other_addresses_are_triton_s(kernel, first):
    run = launcher(kernel)
    for address in (first, 40, 56):
        run.launch([at(address)], (1,), (3,))
    assert (len(kernel.devices), kernel.runs) == (3, [])


@pytest.mark.parametrize(("name", "answer"), [("has_hooks", True), ("runs_directly", False)])
def test_launches_that_somebody_watches_are_triton_s(kernel, monkeypatch, name, answer):
    """And those of a version that nobody has run."""
    monkeypatch.setattr(triton_launch, name, lambda: answer)
    run = launcher(kernel)
    for _ in range(2):
        run.launch([at(32)], (1,), (3,))
    assert (len(kernel.devices), kernel.runs) == (2, [])


def test_tensors_of_another_dtype_are_refused(kernel):
    kernel.compiled = None  # as interpreted: all launches are Triton's
    run = launcher(kernel)
    run.launch([torch.zeros(1)], (1,), (3,))
    with pytest.raises(AssertionError, match=r"dtypes \[torch.bfloat16\] given, \[torch.float32\]"):
        run.launch([torch.zeros(1, dtype=torch.bfloat16)], (1,), (3,))
    kernel.arg_names = ["x", "GROUP_M", "N"]
    with pytest.raises(AssertionError, match="constexprs come last"):
        launcher(kernel)


def test_units_are_whole_where_both_operands_begin_with_one():
    whole, apart = torch.zeros(16)[4:], torch.zeros(16)[1:]
    assert has_whole_units(whole, whole)
    for x, w in ((apart, whole), (whole, apart), (apart, apart)):
        assert not has_whole_units(x, w)


@cache
def kernel_keys(seed: int) -> dict[str, dict[str, str]]:
    script = Path(__file__).with_name("kernel_keys.py")
    return json.loads(python(script, seed, TRITON_INTERPRET="0").stdout)


def test_a_kernel_on_disk_is_found_whatever_was_compiled_before_it():
    assert kernel_keys(1)["keys"] == kernel_keys(2)["keys"]


def test_kernels_compiled_ahead_have_the_type_of_any_time_limit():
    """Triton would give a limit below 2.1 s, in nanoseconds, another type and other code."""
    assert {*kernel_keys(1)["limits"].values()} == {"i64"}


def test_what_notices_a_change_of_triton_is_there():
    """Each row of private names has a test."""
    rows = (triton_private.__doc__ or "").replace("\\\n", "").splitlines()
    rows = [row for row in rows if row.startswith("| ") and "private name" not in row][1:]
    assert len(rows) > 5
    for row in rows:
        (name,) = re.findall(r"`([\w/]*test_\w+\.py)`", row)
        assert (Path(__file__).parent / name).is_file(), name


class Made:
    """An object whose last field has 128 bytes: addresses of what its slots hold."""

    __slots__ = tuple("abcdefghijklmnop")


def test_the_last_field_of_an_object_is_read():
    made, values = Made(), [object() for _ in Made.__slots__]
    for name, value in zip(Made.__slots__, values, strict=True):
        setattr(made, name, value)
    assert triton_private.bytes_of(made) == struct.pack("16Q", *map(id, values))
