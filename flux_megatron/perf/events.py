"""Tasks in streams: the engine of the event simulation.

A stream runs the tasks of its queue in order, as a GPU's stream or a link does. A task can be in
the queues of several streams, such as a send that both ranks wait for. It begins when it is the
next one in all of them and the tasks that it needs are done.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple


class Deadlock(RuntimeError):
    """No task that is left can begin: an error of the schedule."""


class Stream(NamedTuple):
    """What runs one task at a time: "compute" or "dp" of a rank, or its "link" to `target`."""

    kind: str
    rank: int
    target: int = -1

    def __str__(self) -> str:
        to = f" to {self.target}" if self.kind == "link" else ""
        return f"{self.kind} of rank {self.rank}{to}"


@dataclass(eq=False, slots=True)
class Task:
    """`time_us` of all `streams` at once, after `needs`; `run` fills in when."""

    kind: str  # forward, backward, send, reduce, gather, tied, optimizer
    name: str
    streams: tuple[Stream, ...]
    time_us: float
    needs: list[Task] = field(default_factory=list)
    start_us: float = field(default=0.0, init=False)
    end_us: float = field(default=0.0, init=False)

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".rstrip()


Queues = Mapping[Stream, Sequence[Task]]


def run(queues: Queues) -> float:
    """Set the start and end of every task; returns the end of the last one.

    `Deadlock`, with the next task of every stream, if the tasks that are left wait for each other.
    """
    tasks = {task for queue in queues.values() for task in queue}
    missing = {task: len(task.streams) + len(task.needs) for task in tasks}
    followers: dict[Task, list[Task]] = {}
    for task in tasks:
        for other in task.needs:
            followers.setdefault(other, []).append(task)
    turns = {stream: iter(queue) for stream, queue in queues.items()}
    free = dict.fromkeys(queues, 0.0)
    met = [task for turn in turns.values() for task in islice(turn, 1)]  # one condition of each
    while met:
        task = met.pop()
        missing[task] -= 1
        if missing[task]:
            continue
        del missing[task]
        ready = [free[stream] for stream in task.streams]
        task.start_us = max([*ready, *(other.end_us for other in task.needs)])
        task.end_us = task.start_us + task.time_us
        met.extend(followers.get(task, ()))
        for stream in task.streams:
            free[stream] = task.end_us
            met.extend(islice(turns[stream], 1))
    if missing:
        raise Deadlock(_explain(queues, missing))
    return max(free.values(), default=0.0)


def _explain(queues: Queues, left: Collection[Task]) -> str:
    heads = {stream: [t for t in queue if t in left][:1] for stream, queue in queues.items()}
    words = [f"{stream}: {head[0]}" for stream, head in heads.items() if head]
    return f"no task can begin; next are {', '.join(words)}"
