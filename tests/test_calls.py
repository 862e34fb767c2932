"""Calls by programs, on a driver that notes what is done: what C enqueues is what Python does, in
its order, and whatever C leaves to Python. Real strategies are in `protocol/test_offline_calls.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from fake_driver import Driver
from fake_engines import CALLERS, FUNCTION, NEEDS, OTHER, STREAM, engine
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from flux_megatron import settings
from flux_megatron.kernels import descriptors, native_launch, triton_launch, triton_private
from flux_megatron.overlap import by_c, calls, collectives, transfer
from flux_megatron.overlap.calls import InFlight
from flux_megatron.problem import Plan, Tile
from flux_megatron.scaling import Scaling
from flux_megatron.symm import channel as channels
from flux_megatron.symm.enqueue import MADE, TABLE, W, always
from flux_megatron.symm.lru_cache import LRUCache
from flux_megatron.symm.program import Builder, CallProgram
from flux_megatron.symm.steps import Slot

pytest_plugins = ("fake_engines",)
pytestmark = NEEDS
M, N, K = 4, 8, 4
IS_WATCHED = calls.is_watched
PLAN = Plan("fused")
REGIONS = [torch.full((M, K), 3.0), torch.full((M, K), 5.0)]
SIGNAL = 3000


class Compiled:
    """What Triton has of a kernel; `run` does nothing: the driver's record is C's."""

    function, packed_metadata = FUNCTION, (4, 1, 2048)
    metadata = SimpleNamespace(
        tensordesc_meta=None, launch_cooperative_grid=False, launch_pdl=False,
        profile_scratch_size=0, global_scratch_size=0,
    )  # fmt: skip
    src = SimpleNamespace(
        signature={"x": "*fp32", "y": "*fp32", "region": "*fp32", "status": "*i32", "rank": "i32",
                   "epoch": "i32", "N": "i64", "GROUP_M": "constexpr"}
    )  # fmt: skip
    SIZES = (8, 8, 8, 8, 4, 4, 8, 8, 8)

    def run(self, *given: object) -> None:
        pass


COMPILED = Compiled()


class Kernel:
    __name__ = "stand_in_kernel"

    def __init__(self) -> None:
        self.arg_names = [*Compiled.src.signature]
        self.params = [
            SimpleNamespace(
                do_not_specialize=True, is_constexpr=name == "GROUP_M", annotation_type=""
            )
            for name in self.arg_names
        ]

    def __getitem__(self, grid: object) -> Callable[..., Compiled]:
        return lambda *given, **named: COMPILED


KERNEL: list[Kernel] = []


class Channel(channels.Channel):
    """One of real regions without peers."""

    def __init__(self) -> None:
        self.epoch, self.open, self.region_bytes, self.poisoned = 0, False, 1000, []
        status = torch.zeros(4, dtype=torch.int32)
        self._regions = [self._region(rows, status) for rows in REGIONS]

    def _region(self, rows: Tensor, status: Tensor) -> SimpleNamespace:
        fixed = [status] * len(channels.Channel.FIXED)
        words = (rows.data_ptr(), 900, 0, *[one.data_ptr() for one in fixed])
        return SimpleNamespace(
            rank=0, entries=None, fixed=fixed, words=words, rows=rows,
            table=b"".join(word.to_bytes(8, "little") for word in words),
            prepared=lambda make, shape, dtype, offset: rows,
        )  # fmt: skip

    def begin(self, captured: bool) -> SimpleNamespace:
        self.open, self.epoch = True, self.epoch + 1
        region = self._regions[self.epoch % 2]
        return SimpleNamespace(epoch=self.epoch, region=region, channel=self)

    def poison(self, region: SimpleNamespace) -> None:
        self.poisoned.append(region)


class Space:
    """A workspace of one rank."""

    rank, world_size, timeout_ns, broken = 0, 1, 10, ""

    def __init__(self, driver: Driver) -> None:
        self.engine, self.driver, self.channel = engine(), driver, Channel()
        self.channels, self.programs = {"gather": self.channel}, LRUCache()

    def begin(self, name: str, size_bytes: int, kind: type) -> SimpleNamespace:
        assert not self.channel.open
        return self.channel.begin(False)

    def end(self, call: SimpleNamespace) -> None:
        call.channel.end(call)

    device, mailboxes, stage = torch.device("cpu"), False, None

    def guard(self, *, whole: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def fail(self, error: BaseException, is_open: bool, half_made: bool) -> None:
        self.broken = str(error) * is_open


DRIVER: list[Driver] = []
BEFORE_GEMM: list[Callable[[], None]] = [lambda: None]


def gemm(x: Tensor, w: Tensor, out: Tensor) -> None:
    BEFORE_GEMM[0]()
    DRIVER[0].by_torch(CALLERS, x.data_ptr(), w.data_ptr(), out.data_ptr())
    torch.mm(x, w.t(), out=out)


def kernel_call(p: CallProgram) -> Slot:
    """One list: a push, a kernel, a signal, a join."""
    channel = p.channel("gather", 100)
    p.move("fork")
    p.copy(channel.peer(0, 16), p.x[1:])
    y = p.x.new_empty(2 * M, N)
    region = channel.region((M, K), p.x.dtype)
    triton_launch.launch_kernel(
        KERNEL[0], (3,), Tile(group_m=5, num_warps=4),
        (p.x, y, region, channel.fixed("status")), (2, channel.epoch), (64,),
    )  # fmt: skip
    p.move("signal", channel.signal(0, 0, 3), channel.epoch)
    p.move("join")
    return y


def gemms(p: CallProgram) -> Slot:
    """Three of torch's with moves between them, and a turn that lends the region."""
    channel = p.channel("gather", 100)
    region = channel.region((M, K), p.x.dtype)
    p.move("fork")
    p.copy(channel.peer(0), p.x)
    y = p.x.new_empty(2 * M, N)
    p.torch(gemm, p.x[:3], p.w, y[:3])
    p.move("signal", always(SIGNAL), channel.epoch)
    p.torch(gemm, p.x[1:][2:], p.w, y[3:M])
    p.torch(gemm, region, p.w, y[M:])
    if p.bias is not None:
        p.torch(Tensor.add_, y, p.bias)
    p.caller_step(region)
    p.move("copy_here", always(70), p.x.operand, always(8))
    p.move("join")
    p.held += (p.x,)
    return y


def gemms_with_a_table(p: CallProgram) -> Slot:
    p.kept(torch.zeros(4))
    return gemms(p)


def gemm_first(p: CallProgram) -> Slot:
    channel = p.channel("gather", 100)
    y = p.x.new_empty(M, N)
    p.torch(gemm, p.x, p.w, y)
    p.move("signal", channel.signal(0, 0, 3), channel.epoch)
    return y


def two_signals(p: CallProgram) -> Slot:
    for name in ("gather", "scatter"):
        channel = p.channel(name, 100)
        p.move("signal", channel.signal(0, 0, 3), channel.epoch)
    return p.x.new_empty(M, N)


def scales_read(p: CallProgram) -> Slot:
    channel = p.channel("gather", 100)
    for number, scale in enumerate(p.scaling[:2]):
        p.copy(channel.peer(0, 4 * number), scale)
    return p.x.new_empty(M, N)


@pytest.fixture
def space(driver, monkeypatch) -> Space:
    monkeypatch.setattr(triton_launch, "runs_directly", lambda: True)
    monkeypatch.setattr(triton_launch, "_compiled", {})
    monkeypatch.setattr(calls, "is_watched", lambda: False)
    monkeypatch.setattr(Tensor, "record_stream", lambda one, stream: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: CALLERS)
    BEFORE_GEMM[0] = lambda: None
    KERNEL[:], DRIVER[:] = [Kernel()], [driver]
    driver.expect_parameters(FUNCTION, *Compiled.SIZES)
    monkeypatch.setattr(driver, "cuStreamGetCaptureInfo", lambda stream: (0, 0, 0), raising=False)
    space = Space(driver)
    monkeypatch.setattr(space.engine, "capture", lambda stream: 0)
    return space


def operands(number: int) -> tuple[Tensor, Tensor]:
    """Elsewhere each time, and not at the beginning of their storages."""
    memory = torch.arange(200.0) + number
    return memory[16 : 16 + M * K].view(M, K), memory[100 : 100 + N * K].view(N, K)


ag_gemm, start = partial(calls.whole, gemms), partial(calls.start, gemms)


def of(build: Builder) -> Callable[..., Tensor]:
    def call(x: Tensor, w: Tensor, layout: str, plan: Plan, space: Space, *scaling: Scaling):
        return calls.whole(build, x, w, None, layout, plan, space, None, *scaling)

    return call


whole, by_kernel = of(gemms), of(kernel_call)


def test_collectives_are_awaited_as_they_began(monkeypatch):
    awaited: list[str] = []
    monkeypatch.setattr(collectives, "wait", lambda work, space: awaited.append(work))
    call = SimpleNamespace(works=["first", "second"], space=None)
    for _ in range(3):
        collectives._wait_for(call)
    assert awaited == ["first", "second"]


def program(space: Space) -> CallProgram:
    (found,) = space.programs.values()
    return found


def streams(space: Space) -> list[tuple]:
    """What was done in which stream, which is then forgotten."""
    return [one[:2] for one in space.driver.done()]


FORK = [("record", CALLERS), ("follow", STREAM)]
JOIN = [("record", STREAM), ("follow", CALLERS)]
GEMM = [("torch", CALLERS)]
FIRST = [*FORK, ("copy", STREAM), *GEMM, ("write", STREAM), *GEMM, *GEMM]
LAST = [("copy", CALLERS), *JOIN]


def test_the_first_call_is_a_list_as_soon_as_its_kernels_are_compiled(space):
    triton_launch.launches.clear()
    ran_by_c = []
    for number in range(5):
        x, w = operands(number)
        y = by_kernel(x, w, "nt", PLAN, space)
        epoch, at = space.channel.epoch, space.channel._regions[space.channel.epoch % 2]
        did = [*space.driver.done()]
        ran_by_c.append(("launch", CALLERS, FUNCTION, 3 << 32 | 128, 2048) in did)
        moved = [one for one in did if one[0] != "launch"]
        assert [one[:2] for one in moved] == [*FORK, ("copy", STREAM), ("write", STREAM), *JOIN]
        assert moved[2][2:] == (at.rows.data_ptr() + 16, x.data_ptr() + 16, 12 * 4)
        assert moved[3][2:] == (900 + 4 * 3, epoch, 0)
        if ran_by_c[-1]:
            data = space.driver.parameters(sum(Compiled.SIZES))
            pieces = [int.from_bytes(data[n : n + 8], "little") for n in range(0, len(data), 8)]
            addresses = [one.data_ptr() for one in (x, y, at.rows, at.fixed[0])]
            assert pieces == [*addresses, epoch << 32 | 2, 64, 0, 0]
    assert ran_by_c == [False] + [True] * 4, "Triton has compiled it in the first"
    assert triton_launch.launches == {"stand_in": 5}
    other = by_kernel(torch.ones(2 * M, K), operands(1)[1], "nt", PLAN, space)
    assert ("launch", CALLERS) in streams(space), "of other shapes, at once"
    assert len(other) == 2 * M
    assert len(space.programs) == 2


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_both_executors_do_the_same_with_functions_of_torch(space, biased, watched, monkeypatch):
    monkeypatch.setattr(calls, "is_watched", lambda: watched)
    for number in range(4):
        x, w = operands(number)
        bias = torch.arange(1.0 * N) + number if biased else None
        lent: list[Tensor] = []
        y = ag_gemm(x, w, bias, "nt", PLAN, space, lent.append)
        region = REGIONS[space.channel.epoch % 2]
        assert lent[0] is region
        expected = torch.cat([x, region]) @ w.t()
        assert torch.equal(y, expected if bias is None else expected + bias)
        did = [*space.driver.done()]
        assert [one[:2] for one in did] == [*FIRST, *LAST]
        row, at = y[0].nbytes, y.data_ptr()
        of_torch = [one[2:] for one in did if one[0] == "torch"]
        assert of_torch == [
            (x.data_ptr(), w.data_ptr(), at), (x[3:].data_ptr(), w.data_ptr(), at + 3 * row),
            (region.data_ptr(), w.data_ptr(), at + M * row),
        ]  # fmt: skip
        assert did[4][2:] == (SIGNAL, space.channel.epoch, 0)
        assert (program(space).lists is None) == watched
    assert not space.channel.open
    wanted = space.channel._regions * 2 if settings.get().poison else []
    assert len(space.channel.poisoned) == len(wanted)


@pytest.mark.parametrize(("build", "kept"), [(gemms, False), (gemms_with_a_table, True)])
def test_steps_that_c_has_in_lists_are_built_again_for_python(space, build, kept, monkeypatch):
    """But those of a program that keeps a tensor, whose address C has."""
    (x, w), bias = operands(1), torch.arange(1.0 * N)
    results = []
    for watched in (False, True):
        monkeypatch.setattr(calls, "is_watched", lambda at=watched: at)
        results.append(calls.whole(build, x, w, bias, "nt", PLAN, space)[:M])  # of x itself
        assert bool(program(space).segments) == (kept or watched)
    assert torch.equal(*results)


def test_what_c_refuses_python_does(space, monkeypatch):
    """In a capture; nothing is enqueued twice."""
    ag_gemm(*operands(1), None, "nt", PLAN, space, lambda rows: None)
    streams(space)
    for capturing in (1, -1):
        space.driver.word("fake_capturing").value = capturing
        before = space.channel.epoch
        call = InFlight(program(space), *operands(2), None)
        assert call._lists is None
        call.finish()
        assert streams(space) == [*FIRST, *LAST]
        assert space.channel.epoch == before + 1
        made = call.tensors[calls._MADE :]
        assert len(made) == 1, "memory that C would not take is given back"


def test_a_program_makes_no_more_tensors_than_there_are_registers_for(space):
    """The next register is the table's: a step would get the address of something else."""
    of_x, w = operands(0)
    made = CallProgram(space, PLAN, of_x, w, None, "nt", False)
    last = [made.x.new_empty(1, 1) for _ in range(TABLE - MADE)][-1]
    assert last.operand.register == TABLE - 1
    with pytest.raises(AssertionError, match="at most 7 tensors"):
        made.x.new_empty(1, 1)
    with pytest.raises(AssertionError, match="more than 7 tensors"):
        by_c._Builder(made, space.engine)._scratch(8)


@pytest.mark.parametrize("watched", [False, True])
def test_each_of_two_channels_has_its_own_epoch(space, watched, monkeypatch):
    monkeypatch.setattr(calls, "is_watched", lambda: watched)
    space.channels["scatter"] = Channel()
    space.channels["scatter"].epoch = 40
    begin = lambda name, *given: space.channels[name].begin(False)  # noqa: E731
    monkeypatch.setattr(space, "begin", begin)
    call = of(two_signals)
    for number in range(1, 4):
        call(*operands(number), "nt", PLAN, space)
        assert [one[3] for one in space.driver.done()] == [number, 40 + number]


def test_kernels_that_python_launches_get_epochs_of_32_bits(space, monkeypatch):
    given: list[tuple] = []
    launched = lambda self, grid: lambda *one, **named: (given.append(one), COMPILED)[1]  # noqa: E731
    monkeypatch.setattr(Kernel, "__getitem__", launched)
    space.channel.epoch = 2**31 - 1
    by_kernel(*operands(0), "nt", PLAN, space)
    assert -(2**31) in [one for one in given[0] if isinstance(one, int)]


def test_a_captured_call_is_python_s(space, monkeypatch):
    monkeypatch.setattr(transfer, "rank_barrier", lambda call: None)
    by_kernel(*operands(0), "nt", PLAN, space)
    for captured in (False, True):
        for region in space.channel._regions:
            region.entries = 1 if captured else None
        space.engine._last = None  # a capture has another stream
        streams(space)
        by_kernel(*operands(1), "nt", PLAN, space)
        assert (("launch", CALLERS) in streams(space)) == (not captured)


def test_no_lists_are_made_in_a_capture(space, monkeypatch):
    monkeypatch.setattr(calls, "capturing", lambda device: True)
    for number in range(3):
        by_kernel(*operands(number), "nt", PLAN, space)
    assert program(space).lists is None


def test_no_lists_are_made_of_steps_that_another_thread_has_forgotten(space):
    for number in range(2):
        by_kernel(*operands(number), "nt", PLAN, space)
    made = program(space)
    assert made.lists is not None
    made.lists = None  # as that thread found it
    assert by_c.lists_of(made, space.engine) is None


def test_c_is_asked_before_the_first_function_of_torch(space):
    call = of(gemm_first)
    call(*operands(0), "nt", PLAN, space)
    space.driver.word("fake_capturing").value = 1
    refused = InFlight(program(space), *operands(1), None)
    assert (refused.program.lists is None, refused._lists) == (False, None)


def test_a_whole_call_that_c_refuses_is_taken_back(space):
    for _ in range(2):
        by_kernel(*operands(0), "nt", PLAN, space)
    streams(space)
    before = space.channel.epoch
    space.driver.word("fake_capturing").value = 1
    by_kernel(*operands(0), "nt", PLAN, space)
    assert ("launch", CALLERS) not in streams(space)
    assert (space.channel.epoch, space.channel.open) == (before + 1, False)


@pytest.mark.parametrize("pieces", [False, True])
def test_a_call_in_another_stream_comes_behind_the_last_one(space, monkeypatch, pieces):
    def call(number: int) -> Tensor:
        x, w = operands(number)
        if pieces:
            start(x, w, "nt", PLAN, space).finish()
        else:
            by_kernel(x, w, "nt", PLAN, space)
        return x

    for number in range(2):
        call(number)
    streams(space)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: OTHER)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: OTHER)
    held: list[int] = []
    monkeypatch.setattr(Tensor, "record_stream", lambda one, stream: held.append(one.data_ptr()))
    x = call(2)
    assert streams(space)[:2] == [("record", CALLERS), ("follow", OTHER)]
    assert held == [x.data_ptr()] * pieces, "what its pushes read, which another stream has made"


@pytest.mark.parametrize("wanted", ["refresh", "growth", "open"])
def test_a_call_that_cannot_begin_at_once_begins_as_the_first_does(space, monkeypatch, wanted):
    for number in range(3):
        by_kernel(*operands(number), "nt", PLAN, space)
    streams(space)
    begin = mock.Mock(side_effect=lambda *given: space.channel.begin(False))
    monkeypatch.setattr(space, "begin", begin)
    by_kernel(*operands(1), "nt", PLAN, space)
    assert not begin.called
    if wanted == "refresh":
        monkeypatch.setattr(channels, "REFRESH_EVERY", space.channel.epoch + 1)
    elif wanted == "growth":
        space.channel.region_bytes = 10
    else:
        space.channel.open = True
    by_kernel(*operands(1), "nt", PLAN, space)
    assert [one.args[0] for one in begin.call_args_list] == ["gather"]
    assert ("launch", CALLERS) in streams(space), "by C nevertheless"


def test_a_region_elsewhere_is_another_table(space):
    by_kernel(*operands(0), "nt", PLAN, space)
    by_kernel(*operands(0), "nt", PLAN, space)
    lists = program(space).lists
    space.channels["gather"] = space.channel = Channel()
    moved = torch.zeros(2, M, K)
    space.channel._regions = [space.channel._region(rows, torch.zeros(4)) for rows in moved]
    streams(space)
    by_kernel(*operands(0), "nt", PLAN, space)
    assert program(space).lists is lists
    (to,) = (one[2] for one in space.driver.done() if one[0] == "copy")
    assert to == moved[1].data_ptr() + 16


@pytest.mark.parametrize("refused", [2, 4, 8, 9])
def test_an_error_of_the_driver_breaks_the_group_off(space, refused):
    whole(*operands(0), "nt", PLAN, space)
    streams(space)
    space.driver.refuse(refused, 719)
    with pytest.raises(RuntimeError, match=r"cu\w+ failed: 719"):
        whole(*operands(1), "nt", PLAN, space)
    assert space.channel.open
    assert "failed: 719" in space.broken


def test_an_error_of_a_function_breaks_the_group_off_and_one_of_the_caller_does_not(space):
    whole(*operands(0), "nt", PLAN, space)
    streams(space)

    def refuse(rows: Tensor | None = None) -> None:
        raise ValueError("no wgrad")

    def after(call: Callable, *given: object) -> tuple[bool, str, list[tuple]]:
        with pytest.raises(ValueError, match="no wgrad"):
            call(*given)
        return space.channel.open, space.broken, streams(space)

    # the other ranks wait for the rest of it
    found = after(ag_gemm, *operands(1), None, "nt", PLAN, space, refuse)
    assert found == (False, "", [*FIRST, *LAST])
    BEFORE_GEMM[0] = refuse
    assert after(whole, *operands(1), "nt", PLAN, space) == (True, "no wgrad", FIRST[:3])


def test_a_profiler_sees_the_phases_of_a_call_that_c_runs_otherwise(space, monkeypatch):
    monkeypatch.setattr(calls, "is_watched", IS_WATCHED)
    for number in range(4):
        by_kernel(*operands(number), "nt", PLAN, space)
    ran: list[InFlight] = []
    noted = lambda call: not ran.append(call)  # noqa: E731
    by_python = mock.patch.object(InFlight, "_by_python", autospec=True, side_effect=noted)
    with by_python:
        by_kernel(*operands(1), "nt", PLAN, space)
        assert not ran
        with profile(activities=[ProfilerActivity.CPU]):
            by_kernel(*operands(1), "nt", PLAN, space)
    assert len(ran) == 1


def test_a_call_in_pieces(space):
    for _ in range(3):
        call = start(*operands(1), "nt", PLAN, space)
        assert streams(space) == FIRST
        assert space.channel.open
        y = call.finish()
        assert streams(space) == LAST
        assert not space.channel.open
        assert len(y) == 2 * M


def test_pieces_follow_the_callers_stream(space, monkeypatch):
    """The caller goes on with a call in another stream than it began in."""
    start(*operands(0), "nt", PLAN, space).finish()
    call = start(*operands(1), "nt", PLAN, space)
    streams(space)
    used: list[tuple[int, int]] = []
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: OTHER)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: OTHER)
    held = lambda one, stream: used.append((one.data_ptr(), stream))  # noqa: E731
    monkeypatch.setattr(Tensor, "record_stream", held)
    y = call.finish()
    x = call.tensors[0]
    assert used == [(y.data_ptr(), OTHER), (x.data_ptr(), OTHER)], "else freed too early"
    ordered, joined = ([("record", stream), ("follow", OTHER)] for stream in (CALLERS, STREAM))
    assert streams(space) == [*ordered, ("copy", OTHER), *joined]


@pytest.mark.parametrize("watched", [False, True])
def test_what_follows_a_function_comes_after_other_threads(space, watched, monkeypatch):
    monkeypatch.setattr(calls, "is_watched", lambda: watched)
    whole(*operands(0), "nt", PLAN, space)
    streams(space)
    BEFORE_GEMM[0] = lambda: setattr(space.engine, "_last", OTHER)
    whole(*operands(1), "nt", PLAN, space)
    gemm_and_order = [*GEMM, ("record", OTHER), ("follow", CALLERS)]
    assert streams(space) == [
        *FIRST[:3], *gemm_and_order, ("write", STREAM), *gemm_and_order, *gemm_and_order, *LAST,
    ]  # fmt: skip


def test_a_kernel_with_other_parameters_is_left_to_python(space, driver):
    driver.expect_parameters(FUNCTION, *Compiled.SIZES[:-1])
    by_c._say.cache_clear()
    by_kernel(*operands(0), "nt", PLAN, space)  # compiles the kernel
    with pytest.warns(UserWarning, match="Python makes the driver calls of a call"):
        by_kernel(*operands(1), "nt", PLAN, space)
    with mock.patch.object(by_c, "_Builder") as tried:
        by_kernel(*operands(2), "nt", PLAN, space)
    assert (program(space).lists, tried.call_count) == (None, 0)
    assert "parameters of [8, 8, 8, 8, 4, 4, 8, 8] bytes" in program(space).unlisted
    assert ("launch", CALLERS) not in streams(space)


def test_the_launch_says_what_it_cannot_be(space):
    compiled = Compiled()
    compiled.src = SimpleNamespace(signature={"x": "fp32"})
    with pytest.raises(native_launch.Unusable, match="stand_in takes x as fp32"):
        native_launch.layout_of("stand_in", compiled, ["x"], [None])


@pytest.mark.parametrize("meta", [None, {}, {"swizzle": 2}, {"block_size": [32, 64]}])
def test_descriptors_that_triton_makes_otherwise_are_left_to_it(space, meta, monkeypatch):
    """`meta` is what Triton changes; it makes its own of its description all the same."""
    slot = Slot(mock.Mock(), W, (64, 64), torch.bfloat16)
    known = {"elem_type": 10, "elem_size": 2, "swizzle": 3, "block_size": [64, 64]}
    made = native_launch.enqueue.native().descriptor(
        struct.pack("7i", 2, 0, 9, 2, 3, 64, 64), 256, 512
    )
    monkeypatch.setattr(triton_private, "described", lambda *given: (made,))
    monkeypatch.setattr(triton_private, "bytes_of", lambda one: one)
    find = partial(
        native_launch._descriptor, "stand_in", "x", given=descriptors.described(slot, 64, 64)
    )
    if meta == {}:
        assert find(meta=known) == (9, 2, 3, 64, 64)
        return
    with pytest.raises(native_launch.Unusable, match=r"stand_in.* x (in pieces|in another way)"):
        find(meta=meta and known | meta)


def test_programs_differ_by_all_that_they_are_built_for(space):
    x, w = operands(0)
    whole(x, w, "nt", PLAN, space)
    start(x, w, "nt", PLAN, space).finish()
    by_kernel(x, torch.ones(2 * N, K), "nt", PLAN, space)
    whole(x, w, "nt", Plan("hopper"), space)
    ag_gemm(x, w, torch.zeros(N), "nt", PLAN, space, None)
    by_kernel(x, w, "nt", PLAN, space)
    assert len(space.programs) == 6
    whole(x, w, "nt", replace(PLAN), space)  # an equal plan
    assert len(space.programs) == 6
    for out_dtype, split in ((torch.float16, False), (torch.float32, False), (torch.float32, True)):
        for _ in range(2):  # other scales are no other program
            whole(x, w, "nt", PLAN, space, Scaling(*torch.rand(2), out_dtype, split))
    assert len(space.programs) == 9


@pytest.mark.parametrize("watched_from", [0, 2, 4])
def test_the_scales_of_fp8_are_those_of_each_call(space, watched_from, monkeypatch):
    call = of(scales_read)
    for number in range(4):  # each at an address of its own, which is no multiple of 16
        monkeypatch.setattr(calls, "is_watched", lambda at=number: at >= watched_from)
        x_scale, w_scale = torch.rand(100)[1:3]
        call(*operands(0), "nt", PLAN, space, Scaling(x_scale, w_scale, torch.float32, False))
        read = [one[3] for one in [*space.driver.done()]]
        assert read == [x_scale.data_ptr(), w_scale.data_ptr()]
    assert (program(space).lists is None) == (watched_from == 0)
