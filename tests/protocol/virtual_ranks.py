"""A deterministic scheduler: many virtual ranks, each with a host and its streams, in one process.

Each host, CTA, push and signal is a strand: a thread, of which only one runs at a time. A
CTA may have further strands, for warps that work apart. A rank is modelled on a GPU. Its host runs
ahead and only enqueues; `compute` runs kernels and torch's in-place operations in order, `copy`
runs pushes and signals in order, and events order the two. `second` is another stream like
`compute`, for callers that change theirs, and `flags` one for flags of what collectives bring. Of a
kernel's CTAs at most `resident` are there at a time, and another one starts when one of them has
ended: in the order of their ids or, with `any_order`, in one that the seed decides.

The schedule decides who runs next whenever a strand waits, ends, or, with `preempt`, is about to
touch memory. The seed decides it all, so that a failure can be run again. What cannot be seen here:
memory order and CTA barriers, because every access is sequentially consistent.
"""

from __future__ import annotations

import inspect
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import triton.language as tl
from interpreted_access import before_each_access
from memory_checker import AddressChecker, Region
from strands import Relay, Strand
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter


class Deadlock(AssertionError):
    """Nothing can run; the message says who waits for what."""


@dataclass(frozen=True)
class Schedule:
    name: str
    policy: str  # "sequential" (lowest rank first), "reverse" or "random"
    seed: int = 0
    resident: int = 1_000
    any_order: bool = False
    # also switch before every access and after everything that a host enqueues
    preempt: bool = False
    # one rank, chosen by the seed, gets only every tenth turn while others can run
    late: bool = False


STANDARD = (
    Schedule("sequential", "sequential", resident=1),
    Schedule("reverse", "reverse"),
    Schedule("random 1", "random", seed=1),
    Schedule("random 2", "random", seed=2, resident=2, any_order=True, late=True),
    Schedule("preempt 1", "random", seed=1, preempt=True),
    Schedule("preempt 2", "random", seed=2, preempt=True, late=True),
    Schedule("preempt 3", "random", seed=3, resident=2, any_order=True, preempt=True, late=True),
)


STREAMS = ("compute", "second", "copy", "flags", "arrivals")


class Stream:
    """Work in order: an item is a list of strands, all of which end before the next item starts."""

    def __init__(self, resident: int) -> None:
        self._items: deque[list[Strand]] = deque()
        self._resident = resident
        self.enqueued = self.finished = 0

    def put(self, strands: list[Strand]) -> None:
        self._items.append(strands)
        self.enqueued += 1

    def live(self) -> list[Strand]:
        """The strands that have started or may start."""
        while self._items:
            unfinished = [strand for strand in self._items[0] if not strand.done]
            if unfinished:
                resident = unfinished[: self._resident]
                return [one for strand in resident for one in strand.live()]
            self._items.popleft()
            self.finished += 1
        return []

    def strands(self) -> list[Strand]:
        ctas = itertools.chain.from_iterable(self._items)
        return [strand for cta in ctas for strand in (cta, *cta.children)]


class Graph:
    """What a host has enqueued during a capture, as a CUDA graph has it: every address and number
    as it was then.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.items: list[tuple[str, Callable[[], list[Strand]]]] = []

    def replay(self) -> None:
        """Enqueue it all again, behind what the streams hold."""
        for stream, strands in self.items:
            self._scheduler._put(stream, strands)


class _Recorder(TorchDispatchMode):
    """A host's torch calls: what writes is enqueued on the compute stream, new tensors are NaN."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            current = self._scheduler.current_stream
            self._scheduler.enqueue(current, str(func), lambda: func(*args, **kwargs))
            return kwargs.get("out", args[0])
        result = func(*args, **kwargs)
        if "empty" in func.__name__ and result.is_floating_point():
            result.fill_(float("nan"))
            self._scheduler.keep_alive.append(result)
        return result


class Scheduler:
    """`run` takes one host a rank; kernels that a host launches are strands of its rank."""

    def __init__(self, schedule: Schedule, reachable: Sequence[Region] = ()) -> None:
        self._schedule = schedule
        self._random = random.Random(schedule.seed)
        self._reachable = reachable  # may grow while ranks run
        self._hosts: list[Strand] = []
        self._streams: list[dict[str, Stream]] = []
        self._current: Strand | None = None
        self._known_live: list[Strand] | None = None
        self.trace: list[str] = []
        # pushes know addresses only, and hosts forget tensors before their pushes have run
        self.keep_alive: list[object] = []
        self._graphs: dict[int, Graph] = {}  # of the hosts that are capturing now

    def run(self, hosts: Sequence[Callable[[], None]]) -> None:
        """Until all hosts and streams are done. Raises `Deadlock`, or what a strand raised."""
        resident = self._schedule.resident
        self._hosts = [Strand(r, "host", self._recorded(host)) for r, host in enumerate(hosts)]
        self._streams = [
            {name: Stream(1 if name == "copy" else resident) for name in STREAMS} for _ in hosts
        ]
        self._current_streams = ["compute" for _ in hosts]
        with self._interpreting():
            relay = Relay(self)
            try:
                relay.run()
            finally:
                relay.over = True
                for strand in self._all_strands():
                    strand.abort()

    def next(self) -> Strand | None:
        """Who runs now, or None when all have ended; of a CTA, at its place in the grid."""
        live = self._live()
        strand = next((strand for strand in self._in_turn(live) if strand.runnable), None)
        if strand is not None:
            self.trace.append(f"{strand.rank} {strand.name}")
            if strand.grid is not None:
                interpreter.interpreter_builder.set_grid_dim(*strand.grid)
                interpreter.interpreter_builder.set_grid_idx(*strand.place)
        elif live:
            waits = "; ".join(f"rank {s.rank} {s.name} waits for {s.why}" for s in live)
            raise Deadlock(waits)
        self._current = strand
        return strand

    def ended(self, strand: Strand) -> None:
        """Told when a strand has run to its end."""
        self._known_live = None
        if strand.cta is not strand:
            strand.cta.children.remove(strand)

    def _in_turn(self, live: list[Strand]) -> Iterator[Strand]:
        """The first of them that can run does. Few are asked: most wait, and asking costs."""
        schedule = self._schedule
        if schedule.policy == "sequential":
            yield from live
        elif schedule.policy == "reverse":
            yield from reversed(live)
        elif schedule.late and self._random.random() < 0.9:
            late = schedule.seed % len(self._hosts)
            yield from self._shuffled([strand for strand in live if strand.rank != late])
            yield from self._shuffled([strand for strand in live if strand.rank == late])
        else:
            yield from self._shuffled([*live])

    def _shuffled(self, strands: list[Strand]) -> Iterator[Strand]:
        while strands:
            place = int(self._random.random() * len(strands))
            strands[place], strands[-1] = strands[-1], strands[place]
            yield strands.pop()

    def _live(self) -> list[Strand]:
        """Of all ranks. Found anew when one has ended or begun."""
        if self._known_live is None:
            self._known_live = self._find_live()
        return self._known_live

    def _find_live(self) -> list[Strand]:
        live = []
        for host, streams in zip(self._hosts, self._streams, strict=True):
            live += [] if host.done else [host]
            live += [strand for stream in streams.values() for strand in stream.live()]
        return live

    def _all_strands(self) -> list[Strand]:
        streams = [stream for streams in self._streams for stream in streams.values()]
        return self._hosts + [strand for stream in streams for strand in stream.strands()]

    # What strands call, on their own threads.

    @property
    def rank(self) -> int:
        """The rank whose strand runs now."""
        return self.running.rank

    @property
    def current_stream(self) -> str:
        """Of the host that runs now."""
        return self._current_streams[self.rank]

    def use_stream(self, name: str) -> None:
        """Where the calling host enqueues kernels and operations from now on."""
        self._current_streams[self.rank] = name

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """`use_stream` for a while."""
        callers = self.current_stream
        self.use_stream(name)
        yield
        self.use_stream(callers)

    @property
    def running(self) -> Strand:
        assert self._current is not None, "called outside of a run"
        return self._current

    def wait(self, ready: Callable[[], bool], why: str) -> None:
        if not ready():
            self.running.pause(ready, why)

    def enqueue(self, stream: str, name: str, operation: Callable[[], None]) -> None:
        """Let `operation` run on a stream of the calling rank, in one step."""
        self._put(stream, lambda: [Strand(self.rank, name, operation)])

    def put_grid(
        self, name: str, grid: tuple[int, ...], body: Callable[[], None],
        checker: AddressChecker | None = None,
    ) -> None:  # fmt: skip
        """Enqueue a kernel of the calling rank: `body` runs in each of its CTAs."""
        grid = (*grid, *(1,) * (3 - len(grid)))

        def ctas() -> list[Strand]:
            strands = []
            for place in itertools.product(*map(range, grid)):
                cta = Strand(self.rank, f"{name}[{place[0]}]", body)
                cta.grid, cta.place, cta.checker = grid, place, checker
                strands.append(cta)
            if self._schedule.any_order:
                self._random.shuffle(strands)
            return strands

        self._put(self.current_stream, ctas)

    def spawn(self, cta: Strand, name: str, body: Callable[[], None]) -> None:
        """Start a warp of a CTA that runs."""
        warp = Strand(cta.rank, f"{cta.name} {name}", body)
        warp.grid, warp.place, warp.checker, warp.cta = cta.grid, cta.place, cta.checker, cta
        cta.children.append(warp)
        self._known_live = None

    def preemption_point(self) -> None:
        """Before an access to memory that others see."""
        if self._schedule.preempt:
            self.running.pause()

    def order(self, later: str, earlier: str) -> None:
        """What is enqueued on `later` from now on runs after what `earlier` holds now."""

        def event() -> list[Strand]:
            before = self._streams[self.rank][earlier]
            position = before.enqueued
            return [
                self._event(later, lambda: before.finished >= position, f"the {earlier} stream")
            ]

        self._put(later, event)

    def over(self, stream: str) -> Callable[[], bool]:
        """Whether what the calling rank's stream holds now is done, in no graph."""
        before = self._streams[self.rank][stream]
        position = before.enqueued
        return lambda: before.finished >= position

    def patient(self, ready: Callable[[], bool], why: str) -> bool:
        """Wait, or give up at once, as the seed decides; whether it is ready."""
        if self._random.random() < 0.7:
            self.wait(ready, why)
        return ready()

    def hold(self, stream: str, ready: Callable[[], bool], why: str) -> None:
        """What is enqueued on `stream` from now on runs when `ready`."""
        self._put(stream, lambda: [self._event(stream, ready, why)])

    def _event(self, stream: str, ready: Callable[[], bool], why: str) -> Strand:
        return Strand(self.rank, f"{stream} stream", lambda: None, ready=ready, why=why)

    @property
    def capturing(self) -> bool:
        return self._current is not None and self.rank in self._graphs

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        """What the calling host enqueues goes into a graph instead, with all that it refers to."""
        graph = self._graphs[self.rank] = Graph(self)
        try:
            yield graph
        finally:
            del self._graphs[self.rank]

    def synchronize(self) -> None:
        """The calling host waits for its streams."""
        streams = list(self._streams[self.rank].values())
        self.wait(lambda: all(s.finished == s.enqueued for s in streams), "its streams")

    def _put(self, stream: str, strands: Callable[[], list[Strand]]) -> None:
        if self.capturing:
            self._graphs[self.rank].items.append((stream, strands))
            return
        self._streams[self.rank][stream].put(strands())
        self._known_live = None
        if self._schedule.preempt:
            self.running.pause()

    def _recorded(self, host: Callable[[], None]) -> Callable[[], None]:
        def body() -> None:
            with _Recorder(self):
                host()

        return body

    # Interpreted kernels: what Triton's GridExecutor does, except that CTAs become strands.

    @contextmanager
    def _interpreting(self):
        function = interpreter.InterpretedFunction
        launch, call = function.run, function.__call__

        def run(kernel, *args, grid, warmup, **kwargs):
            self._launch(kernel, grid, args, kwargs)

        function.run = run
        # patched here for all kernels; a patch at every nested call would be most of its cost
        function.__call__ = lambda kernel, *args, **kwargs: kernel.rewrite()(*args, **kwargs)
        modules = SimpleNamespace(__globals__={"language": tl, "core": tl.core})
        patches = interpreter._patch_lang(modules)
        try:
            with before_each_access(self._before_access):
                yield
        finally:
            function.run, function.__call__ = launch, call
            patches.restore()

    def _before_access(self, kind: str, pointers, mask) -> None:
        strand = self.running
        if strand.checker is not None:
            strand.checker.check(kind, pointers, mask)
        self.preemption_point()

    def _launch(self, kernel, grid: tuple[int, ...], args: tuple, kwargs: dict) -> None:
        body = kernel.rewrite()
        parameters = inspect.getfullargspec(body).args
        named = {name: value for name, value in kwargs.items() if name in parameters}
        arguments = inspect.getcallargs(body, *args, **named)
        checker = AddressChecker(arguments, self._reachable)
        constexprs = interpreter.GridExecutor(body, kernel.arg_names, grid).constexprs
        values = {
            name: value if name in constexprs else interpreter._implicit_cvt(value)
            for name, value in arguments.items()
        }
        self.put_grid(kernel.__name__, grid, partial(body, **values), checker)
