"""One order for all calls of a device, whatever streams, groups and directions they use.

Two kernels without an order between them can each fill the GPU and wait for what stands behind the
other. So every pair of kernels must be ordered by streams and events alone. Here an engine notes
what is enqueued where, without a GPU; `test_streams.py` does it with real streams.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import plan_of
from ranks import on_cpu_ranks

from flux_megatron import embedding_all_to_all, errors, ops, pieces
from flux_megatron.expert_parallel import ops as expert_ops
from flux_megatron.kernels.triton_launch import Launcher
from flux_megatron.nn.functions import column_parallel_linear
from flux_megatron.overlap import calls, fused, library_gemm, pipelined
from flux_megatron.patterns import COLUMN
from flux_megatron.problem import Plan, Tile
from flux_megatron.symm.copy_engine import CopyEngine
from flux_megatron.symm.cpu_backend import CpuCopyEngine
from flux_megatron.symm.workspaces import workspace

COPY = -1  # the copy engine's stream
FUSED = Plan("fused", tile=Tile(16, 16, 16))


class Enqueued(NamedTuple):
    name: str
    stream: int
    seen: dict[int, int]  # of each stream, how many items come before this one for sure

    def before(self, other: "Enqueued") -> bool:
        return other.seen.get(self.stream, 0) >= self.seen[self.stream]


class Recorder:
    """Streams as vector clocks: what is enqueued on `stream`, and what events put before it."""

    def __init__(self) -> None:
        self.stream = 0
        self.items: list[Enqueued] = []
        self._clocks: dict[int, dict[int, int]] = defaultdict(dict)

    def put(self, name: str, stream: int) -> None:
        clock = self._clocks[stream]
        clock[stream] = clock.get(stream, 0) + 1
        self.items.append(Enqueued(name, stream, dict(clock)))

    def order(self, later: int, earlier: int) -> None:
        for stream, count in self._clocks[earlier].items():
            clock = self._clocks[later]
            clock[stream] = max(clock.get(stream, 0), count)

    @contextmanager
    def recording(self) -> Iterator[None]:
        launch, copy = Launcher.launch, CpuCopyEngine.copy

        def launched(launcher, *given):
            self.put(launcher._kernel.fn.__name__, self.stream)
            launch(launcher, *given)

        def pushed(engine, *given):
            self.put("push", COPY)
            copy(engine, *given)

        engine = mock.patch.multiple(
            CpuCopyEngine,
            current=lambda engine: self.stream,
            order=lambda engine, later, earlier: self.order(later, earlier),
            fork=lambda engine: self.order(COPY, self.stream),
            join=lambda engine: self.order(self.stream, COPY),
            copy=pushed,
        )
        with engine, mock.patch.object(Launcher, "launch", launched):
            yield


def two_groups(record: Recorder, groups) -> None:
    """A scatter of one group stays open while the other group gathers on another stream."""
    x, w = torch.ones(2, 16, 16)
    for _ in range(2):
        record.stream = 1
        scatter = pieces.start_gemm_rs(x, w, groups[0], plan=FUSED)
        record.stream = 2
        ops.all_gather_gemm(x, w, groups[1], plan=FUSED)
        record.stream = 1
        scatter.finish()


def two_directions(record: Recorder, groups) -> None:
    """Both operations of one group, and one that is ended on another stream than it began on."""
    x, w = torch.ones(2, 16, 16)
    record.stream = 1
    ops.all_gather_gemm(x, w, groups[0], plan=Plan("pipelined"))
    record.stream = 2
    scatter = pieces.start_gemm_rs(x, w, groups[0], plan=FUSED)
    record.stream = 3
    scatter.finish()
    record.stream = 1
    ops.all_gather_gemm(x, w, groups[0], plan=FUSED)


def backward(record: Recorder, groups) -> None:
    """A layer's backward has its own stream, and between its pieces another group calls."""
    x, w = (tensor.requires_grad_() for tensor in torch.ones(2, 16, 16))

    def wgrad(w, dy, x):
        record.stream = 3
        ops.all_gather_gemm(dy[:16].contiguous(), w.detach(), groups[1])
        record.stream = 2

    record.stream = 1
    y = column_parallel_linear(x, w, None, group=groups[0], wgrad=wgrad)
    record.stream = 2
    y.sum().backward()
    record.stream = 1
    ops.gemm_reduce_scatter(x.detach(), w.detach(), groups[0])


def other_rooms(record: Recorder, groups) -> None:
    """Experts, an embedding and a channel of a user's, beside a layer of another group."""
    x, w = torch.ones(2, 16, 16)
    counts, rows = torch.full((2, 1), 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)

    def layer() -> None:
        ops.all_gather_gemm(x, w, groups[1], plan=FUSED)

    def experts() -> None:
        plan = Plan("fused", 32, FUSED.tile)
        expert_ops.a2a_gemm(x[:4], w[None], counts, groups[0], capacity=4, plan=plan)

    def tables() -> None:
        embedding_all_to_all(torch.ones(1, 4, 8), rows, torch.arange(3), groups[0])

    for call in (layer, experts, layer, experts, tables, layer, tables):
        record.stream += 1
        call()


SCENARIOS = {f.__name__: f for f in (two_groups, two_directions, backward, other_rooms)}


@pytest.mark.parametrize("scenario", SCENARIOS)
@on_cpu_ranks(2)
def test_every_two_kernels_are_ordered(rank, scenario):
    record = Recorder()
    groups = dist.group.WORLD, dist.new_group([0, 1])
    with record.recording():
        SCENARIOS[scenario](record, groups)
    kernels = [item for item in record.items if item.name != "push"]
    assert len({item.stream for item in kernels}) > 1, "the scenario uses one stream only"
    assert [
        (f"{a.name} on {a.stream}", f"{b.name} on {b.stream}")
        for a, b in itertools.combinations(kernels, 2)
        if not a.before(b)
    ] == []


class Streams(CpuCopyEngine):
    """An engine whose streams may be in captures."""

    def __init__(self) -> None:
        self.captures: dict[int, int] = {}
        self.capture = lambda stream: self.captures.get(stream, 0)


def follow(engine: Streams, *streams: int) -> list[tuple[int, int]]:
    """The orders of streams, the later first, that calls on these ask for."""
    ordered: list[tuple[int, int]] = []
    engine.order = lambda *streams: ordered.append(streams)
    for stream in streams:
        engine.current = lambda stream=stream: stream
        engine.follow()
    return ordered


def test_a_graph_orders_its_own_calls_and_eager_ones_go_on_where_they_were():
    engine = Streams()
    assert follow(engine, 1, 1, 1, 2, 2, 1) == [(2, 1), (1, 2)], "one stream costs no event"
    engine.captures = {5: 70, 6: 70}
    assert follow(engine, 5, 6, 6, 5) == [(6, 5), (5, 6)]
    engine.captures = {6: 71}
    assert follow(engine, 6) == [], "another graph"
    engine.captures = {}
    assert follow(engine, 6) == [(6, 1)], "the eager call before was on stream 1"


def test_an_eager_call_is_not_pulled_into_a_capture():
    engine = Streams()
    follow(engine, 5)
    engine.captures = {5: 70}
    with pytest.raises(errors.WorkspaceError, match="which is being captured"):
        follow(engine, 1)
    assert CopyEngine.capture(CpuCopyEngine(), 0) == 0, "an engine without captures"


GATHERING = {"pipelined": pipelined, "fused": fused}


@pytest.mark.parametrize("strategy", GATHERING)
@on_cpu_ranks(2)
def test_the_local_shard_is_copied_behind_the_gemms(rank, strategy):
    """In front of them GEMMs would wait for the copy, and the copy for all pushes."""
    seen: list[str] = []

    def noting(what: str, original):
        def call(*given, **named):
            if not isinstance(given[0], Launcher) or given[0].name == "ag_gemm":
                seen.append(what)
            return original(*given, **named)

        return call

    x, w = torch.full((4, 16), 1.0 + rank), torch.ones(16, 16)

    def consume(gathered: torch.Tensor) -> None:
        seen.append("consumed")
        assert torch.equal(gathered[:, 0], torch.tensor([1.0] * 4 + [2.0] * 4))

    with (
        mock.patch.object(CpuCopyEngine, "copy", noting("copy", CpuCopyEngine.copy)),
        mock.patch.object(Launcher, "launch", noting("gemm", Launcher.launch)),
        mock.patch.object(library_gemm, "_gemm", noting("gemm", library_gemm._gemm)),
    ):
        space = workspace(dist.group.WORLD, x.device)
        plan = plan_of(strategy, tile=FUSED.tile)
        calls.whole(GATHERING[strategy].BUILDERS[COLUMN], x, w, None, "nn", plan, space, consume)
    gemms = [at for at, what in enumerate(seen) if what == "gemm"]
    assert seen[: gemms[0]] == ["copy"], "the push comes first"
    assert seen[gemms[-1] + 1 :] == ["copy", "consumed"]
