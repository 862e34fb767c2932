"""Repeated calls by lists, on a driver that notes what is done: a stand-in for a strategy, and
whatever a list must leave to it. Real strategies are in `protocol/test_offline_calls.py`.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import fake_driver
import pytest
import torch
from fake_driver import Driver
from fake_engines import CALLERS, FUNCTION, GATED_PUSHES, NEEDS, OTHER, PUSHES, STREAM, engines

from flux_megatron import settings
from flux_megatron.kernels import native_launch, triton_launch
from flux_megatron.overlap import steady as steady_module
from flux_megatron.overlap.steady import Steady
from flux_megatron.problem import Tile
from flux_megatron.symm.cuda_backend import CudaCopyEngine
from flux_megatron.symm.recording import Recording, Unrecordable

pytest_plugins = ("fake_engines",)
pytestmark = NEEDS


class Space:
    """A workspace, a channel of it, and a strategy that makes the calls."""

    unavailable = None

    def __init__(self, engine: CudaCopyEngine) -> None:
        self.engine, self.channels, self.broken = engine, {"gather": self}, ""
        self.epoch, self.open, self._regions = 0, False, (1, 2)
        self.poisoned: list[int] = []
        self.launcher = triton_launch.Launcher(Kernel(), (3,), Tile(group_m=5, num_warps=4), (64,))

    def poison(self, region: int) -> None:
        self.poisoned.append(region)

    def break_off(self, error: BaseException) -> None:
        self.broken = str(error)

    def call(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        self.engine.follow()
        self.epoch += 1
        self.engine.fork()
        self.engine.send(PUSHES[: 1 + self.epoch % 2], x.data_ptr(), self.epoch)
        y = triton_launch.empty(x, 4, 8)
        parts = triton_launch.empty(x, 4, dtype=torch.float32)
        self.launcher((x, w, y, parts), (2, self.epoch))
        self.engine.push_gated(GATED_PUSHES, parts.data_ptr(), self.epoch)
        self.engine.join()
        return y


class Compiled:
    function, packed_metadata = FUNCTION, (4, 1, 2048)
    metadata = SimpleNamespace(
        tensordesc_meta=None, launch_cooperative_grid=False, launch_pdl=False,
        profile_scratch_size=0, global_scratch_size=0,
    )  # fmt: skip
    src = SimpleNamespace(
        signature={"x": "*bf16", "w": "*bf16", "y": "*bf16", "parts": "*fp32", "rank": "i32",
                   "epoch": "i32", "N": "i64", "GROUP_M": "constexpr"}
    )  # fmt: skip
    SIZES = (8, 8, 8, 8, 4, 4, 8, 8, 8)

    def run(self, x, y, z, stream, function, packed, *given) -> None:
        """As Triton's launcher does it: the parameters, and two addresses of scratch memory."""
        *addresses, rank, epoch, N, _ = given[3:]
        numbers = [(one, 8) for one in addresses] + [(rank, 4), (epoch, 4), (N, 8), (0, 8), (0, 8)]
        data = [(value % 2 ** (8 * size)).to_bytes(size, "little") for value, size in numbers]
        held = [ctypes.create_string_buffer(one, len(one)) for one in data]
        pointers = (ctypes.c_void_p * len(held))(*[ctypes.addressof(one) for one in held])
        shape = (ctypes.c_uint * 7)(x, y, z, 32 * packed[0], 1, 1, packed[2])
        how = ctypes.create_string_buffer(
            bytes(shape) + bytes(4) + stream.to_bytes(8, "little"), 64
        )
        DRIVERS[0]._library.cuLaunchKernelEx(how, ctypes.c_void_p(function), pointers, None)


DRIVERS: list[Driver] = []


class Kernel:
    __name__ = "stand_in_kernel"

    def __init__(self) -> None:
        self.arg_names = [*Compiled.src.signature]

    def __getitem__(self, grid):
        return lambda *given, **named: COMPILED


COMPILED = Compiled()


@pytest.fixture
def space(driver, monkeypatch) -> Space:
    monkeypatch.setattr(triton_launch, "runs_directly", lambda: True)
    monkeypatch.setattr(steady_module, "_watched", lambda: False)
    driver.expect_parameters(Compiled.function, *Compiled.SIZES)
    DRIVERS[:] = [driver]
    return Space(engines()[1])


def operands(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((4, 8), number), torch.full((8, 8), number)


def through(steady: Steady, space: Space, number: int) -> tuple[bool, list[tuple], list]:
    """A call: whether a list made it, what has come to the streams, and the kernel's parameters;
    with names for the addresses of what the call is given or makes.
    """
    x, w = operands(number)
    made: list[torch.Tensor] = []
    new = torch.Tensor.new_empty

    def noted(like, shape, dtype=None):
        made.append(new(like, shape, dtype=dtype))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", noted)
        y = steady.run(x, w, None)
        by_list = y is not None
        if not by_list:
            with steady.recorded(x, w, None) as result:
                y = result(space.call(x, w))
    assert y is made[0]
    named = {"x": x, "w": w, "y": made[0], "parts": made[1]}
    names = {one.data_ptr(): name for name, one in named.items()}
    for name in ("x", "parts"):
        names |= {named[name].data_ptr() + p.offset: f"{name} + {p.offset}" for p in PUSHES}
    done = [tuple(names.get(value, value) for value in one) for one in DRIVERS[0].done()]
    data = DRIVERS[0].parameters(sum(Compiled.SIZES))
    pieces = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
    return by_list, done, [names.get(one, one) for one in pieces]


def expected_of(epoch: int) -> tuple[list[tuple], list]:
    pushes = PUSHES[: 1 + epoch % 2]
    sent = [
        one
        for push in pushes
        for one in (
            ("copy", STREAM, push.destination, f"x + {push.offset}", push.size_bytes),
            ("write", STREAM, push.signal, epoch, 0),
        )
    ]
    gated = [
        one
        for n, tiles, push in GATED_PUSHES
        for one in (
            ("wait", STREAM, n, tiles, 0),
            ("copy", STREAM, push.destination, f"parts + {push.offset}", push.size_bytes),
            ("write", STREAM, push.signal, epoch, 0),
        )
    ]
    event = fake_driver.EVENT
    done = [
        ("record", CALLERS, event, 0, 0), ("follow", STREAM, event, 0, 0), *sent,
        ("launch", CALLERS, Compiled.function, 3 << 32 | 128, 2048), *gated,
        *(("write", STREAM, gate.counter, 0, 0) for gate in GATED_PUSHES),
        ("record", STREAM, event, 0, 0), ("follow", CALLERS, event, 0, 0),
    ]  # fmt: skip
    return done, ["x + 0", "w", "y", "parts + 0", epoch << 32 | 2, 64, 0, 0]


def test_repeated_calls_are_lists_that_do_what_the_strategy_does(space):
    steady, by_list = Steady(space, "gather", True), []
    triton_launch.launches.clear()
    for number in range(8):
        one, *did = through(steady, space, number)
        by_list.append(one)
        if number:  # Triton's own launch, the first, is not this driver's
            assert tuple(did) == expected_of(number + 1), f"call {number}, by list: {one}"
    assert by_list == [False] * 3 + [True] * 5
    assert space.epoch == 8
    assert triton_launch.launches == {"stand_in": 8}


def test_regions_are_poisoned_behind_a_list(space):
    steady = listed(space)
    wanted = [1, 2] if settings.get().poison else []
    assert wanted, "the tests run with poison"
    space.poisoned.clear()
    for number in range(2):
        through(steady, space, number)
    assert sorted(space.poisoned) == wanted
    assert space.poisoned[-1] == space._regions[space.epoch % 2]


def listed(space: Space) -> Steady:
    steady = Steady(space, "gather", True)
    for number in range(5):
        by_list, *_ = through(steady, space, number)
    assert by_list
    return steady


def test_what_a_list_cannot_do_is_left_to_the_strategy(space, driver, monkeypatch):
    steady = listed(space)

    def run(x=None) -> torch.Tensor | None:
        given, w = operands(9)
        return steady.run(given if x is None else x, w, None)

    def nothing_done() -> bool:
        return run() is None and not [*driver.done()] and space.epoch == before and not space.open

    before = space.epoch
    driver.word("fake_capturing").value = 1
    assert nothing_done(), "in a capture"
    driver.word("fake_capturing").value = -1
    assert nothing_done(), "where the driver does not say"
    driver.word("fake_capturing").value = 0
    assert run(torch.zeros(40, dtype=torch.int64)[1:33].view(4, 8)) is None, "not aligned"
    space.open = True
    assert run() is None, "an open call"
    space.open = False
    with monkeypatch.context() as patch:
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: OTHER)
        assert nothing_done(), "on another stream"
        patch.undo()
    with monkeypatch.context() as patch:
        patch.setattr(steady_module, "_watched", lambda: True)
        assert nothing_done(), "while somebody looks"
        patch.undo()
    assert not [*driver.done()]
    space._regions = (3, 4)
    assert run() is None, "the channel has grown"


def test_the_call_that_refreshes_is_left_to_the_strategy(space, driver, monkeypatch):
    """Slots that small calls leave alone are set there; a list sets none."""
    steady, by_list = listed(space), []
    monkeypatch.setattr(steady_module, "REFRESH_EVERY", space.epoch + 2)
    for number in range(3):
        one, *_ = through(steady, space, number)
        by_list.append(one)
    assert by_list == [True, False, True]


def test_an_error_leaves_the_call_open_and_breaks_the_group_off(space, driver):
    steady = listed(space)
    driver.refuse(3)
    with pytest.raises(RuntimeError, match=r"cuMemcpyDtoDAsync failed|cuStreamWriteValue32 failed"):
        steady.run(*operands(1), None)
    assert space.open
    assert "failed: 700" in space.broken


def test_a_kernel_with_other_parameters_is_not_recorded(space, driver):
    native_launch._layout.cache_clear()
    driver.expect_parameters(Compiled.function, *Compiled.SIZES[:-1])
    steady = Steady(space, "gather", True)
    assert not any(through(steady, space, number)[0] for number in range(20))
    assert "parameters of [8, 8, 8, 8, 4, 4, 8, 8] bytes" in steady.refused


def test_operands_that_share_memory_are_not_recorded(space):
    x = torch.zeros(8, 8)
    assert Recording(x[:4], x[2:], None).refused
    assert not Recording(x[:4], x[4:], None).refused


def test_the_launch_says_what_it_cannot_be(space):
    recording = Recording(*operands(1), None)
    compiled = Compiled()
    compiled.src = SimpleNamespace(signature={"x": "fp32"})
    with pytest.raises(Unrecordable, match="stand_in takes x as fp32"):
        native_launch.launch("stand_in", compiled, (1,), ["x"], [1.0], recording, None)
