"""The event simulation of a step: each rank's operations, its sends, its replicas' collectives.

Without interleaving a rank computes nothing while it sends, and a send begins when both ranks have
come to it, as in Megatron; interleaved, sends travel beside (`overlap_p2p_comm`), on links.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

from flux_megatron.perf import events
from flux_megatron.perf.events import Stream, Task
from flux_megatron.perf.schedule import Buckets, Costs, Op, Parts, order, warmup

FULL_ROUNDS = 6  # micro-batches that are simulated, for each pipeline rank


@dataclass(frozen=True)
class Simulation:
    """The time of a step by its parts, and all its tasks with their times."""

    parts: Parts
    tasks: list[Task]


def simulate(costs: Costs) -> Simulation:
    """Run the step three times: without any communication, with sends, with everything.

    `events.Deadlock` if the schedule cannot be carried out.
    """
    alone_us, with_sends_us = _pipeline_us(costs)
    queues = _Step(costs).whole()
    end_us = events.run(queues)
    optimizer_us = max(costs.optimizer_us)
    parts = Parts(
        compute_us=costs.busiest_us,
        bubble_us=alone_us - costs.busiest_us,
        pp_us=with_sends_us - alone_us,
        dp_us=end_us - with_sends_us - optimizer_us,
        optimizer_us=optimizer_us,
    )
    tasks = dict.fromkeys(task for queue in queues.values() for task in queue)
    return Simulation(parts, list(tasks))


def _pipeline_us(costs: Costs) -> tuple[float, float]:
    """The time of all operations, without and with sends."""
    step = _Step(costs)
    queues = step.pipeline()
    with_sends_us = events.run(queues)
    for send in step.sends.values():
        send.time_us = 0.0
    return events.run(queues), with_sends_us


def extrapolate(costs: Costs) -> Parts:
    """As `simulate` finds them, in a time that does not grow with the micro-batches: once the
    pipeline is full its turns repeat, and every further micro-batch takes what the last ones took.
    """
    further = costs.micro_batches // costs.pp - FULL_ROUNDS
    if further <= 0:
        return simulate(costs).parts
    short = costs.micro_batches - further * costs.pp
    before, last = (
        astuple(simulate(replace(costs, micro_batches=n)).parts) for n in (short - costs.pp, short)
    )
    return Parts(*(b + further * (b - a) for a, b in zip(before, last, strict=True)))


class Message(NamedTuple):
    """Between pipeline ranks: the output of `op`, or the gradient of its input."""

    source: int
    target: int
    op: Op


class _Step:
    """Builds the queues of all streams for one step."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.queues: dict[Stream, list[Task]] = defaultdict(list)
        self.sends: dict[frozenset[Message], Task] = {}
        self.gathers: dict[tuple[int, int], list[Task]] = {}  # [rank, chunk], by bucket
        self.reduces: dict[tuple[int, int], list[Task]] = {}

    def pipeline(self) -> events.Queues:
        for rank in range(self.costs.pp):
            self._compute(rank)
        return self.queues

    def whole(self) -> events.Queues:
        ranks = range(self.costs.pp)
        for rank in ranks if self.costs.overlap_gather else ():
            self._gather(rank)
        for rank in ranks if self.costs.overlap_reduce else ():
            self._reduce(rank)
        self.pipeline()
        for rank in ranks if not self.costs.overlap_reduce else ():
            self._reduce(rank, self.queues[Stream("compute", rank)][-1:])
        self._update()
        return self.queues

    def _update(self) -> None:
        """No rank updates before the norm of all gradients is known."""
        ends = {Stream("dp", 0), Stream("dp", self.costs.pp - 1)}
        if self.costs.tied_us:
            self._add("tied", "embeddings", sorted(ends), self.costs.tied_us)
        done = [queue[-1] for queue in self.queues.values() if queue]
        for rank, time_us in enumerate(self.costs.optimizer_us):
            update = self._add("optimizer", "", [Stream("compute", rank)], time_us, done)
            if not self.costs.overlap_gather:
                self._gather(rank, [update])

    def _gather(self, rank: int, needs: Sequence[Task] = ()) -> None:
        for chunk in range(self.costs.chunks):
            buckets = self._buckets("gather", rank, chunk, self.costs.gather_us, needs)
            self.gathers[rank, chunk] = buckets

    def _reduce(self, rank: int, needs: Sequence[Task] = ()) -> None:
        for chunk in reversed(range(self.costs.chunks)):  # as backwards complete them
            buckets = self._buckets("reduce", rank, chunk, self.costs.reduce_us, needs)
            self.reduces[rank, chunk] = buckets

    def _buckets(
        self, kind: str, rank: int, chunk: int, times: Buckets, needs: Sequence[Task]
    ) -> list[Task]:
        return [
            self._add(kind, f"{chunk}.{index}", [Stream("dp", rank)], time_us, needs)
            for index, time_us in enumerate(times[rank][chunk])
        ]

    def _compute(self, rank: int) -> None:
        before = None
        for op in order(self.costs.pp, rank, self.costs.micro_batches, self.costs.chunks):
            if self.costs.chunks > 1:
                self._run_beside_sends(rank, op)
            else:
                self._exchange(rank, before, op)
                self._run(rank, op)
            before = op
        if self.costs.chunks == 1:
            self._exchange(rank, before, None)

    def _run(self, rank: int, op: Op, needs: Sequence[Task] = ()) -> Task:
        """One operation, in a piece for each bucket that it waits for or completes; returns the
        last piece.
        """
        forward = op.kind == "forward"
        first = forward and op.micro_batch == 0
        last = not forward and op.micro_batch == self.costs.micro_batches - 1
        waits = self.gathers.get((rank, op.chunk), []) if first else []
        completes = self.reduces.get((rank, op.chunk), []) if last else []
        times = self.costs.forward_us if forward else self.costs.backward_us
        pieces = max(1, len(waits), len(completes))
        for piece in range(pieces):
            needed = [*needs, *waits[piece : piece + 1]]
            time_us = times[rank][op.chunk] / pieces
            task = self._add(op.kind, op.label, [Stream("compute", rank)], time_us, needed)
            for bucket in completes[piece : piece + 1]:
                bucket.needs.append(task)
        return task

    def _exchange(self, rank: int, before: Op | None, after: Op | None) -> None:
        """Send the output of `before`, then receive the input of `after`; both at once between a
        forward and a backward that take turns, if the peer is the same.
        """
        sent = self._outgoing(rank, before) if before else None
        received = self._incoming(rank, after) if after else None
        groups = [[message] for message in (sent, received) if message]
        if sent and received and sent.target == received.source:
            first = warmup(self.costs.pp, rank, chunks=1)
            if sent.op.kind == "backward" or sent.op.micro_batch >= first:
                groups = [[sent, received]]
        for group in groups:
            both = sorted(Stream("compute", r) for r in group[0][:2])
            self.queues[Stream("compute", rank)].append(self._send(group, both))

    def _run_beside_sends(self, rank: int, op: Op) -> None:
        received, sent = self._incoming(rank, op), self._outgoing(rank, op)
        task = self._run(rank, op, [self._link(received)] if received else [])
        if sent:
            link = self._link(sent)
            link.needs.append(task)
            self.queues[link.streams[0]].append(link)

    def _link(self, message: Message) -> Task:
        return self._send([message], [Stream("link", message.source, message.target)])

    def _send(self, messages: Sequence[Message], streams: Sequence[Stream]) -> Task:
        """The same task for both ranks; both directions take the same."""
        key = frozenset(messages)
        if key not in self.sends:
            source, target, op = messages[0]
            time_us = self.costs.send_us[source if op.kind == "forward" else target]
            name = ", ".join(f"{m.op.kind} {m.op.label}" for m in messages)
            self.sends[key] = Task("send", name, tuple(streams), time_us)
        return self.sends[key]

    def _incoming(self, rank: int, op: Op) -> Message | None:
        """From the stage before, in a backward from the one after."""
        peer, chunk = self._neighbour(rank, op.chunk, -1 if op.kind == "forward" else 1)
        inside = 0 <= chunk < self.costs.chunks
        return Message(peer, rank, op._replace(chunk=chunk)) if inside else None

    def _outgoing(self, rank: int, op: Op) -> Message | None:
        peer, chunk = self._neighbour(rank, op.chunk, 1 if op.kind == "forward" else -1)
        return Message(rank, peer, op) if 0 <= chunk < self.costs.chunks else None

    def _neighbour(self, rank: int, chunk: int, step: int) -> tuple[int, int]:
        """(rank, chunk): the layers go through all ranks, then once more with the next chunk."""
        chunk, rank = divmod(chunk * self.costs.pp + rank + step, self.costs.pp)
        return rank, chunk

    def _add(
        self, kind: str, name: str, streams: Sequence[Stream], time_us: float,
        needs: Sequence[Task] = (),
    ) -> Task:  # fmt: skip
        task = Task(kind, name, tuple(streams), time_us, list(needs))
        for stream in streams:
            self.queues[stream].append(task)
        return task
