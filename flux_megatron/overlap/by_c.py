"""A program (`symm.program`) as lists of driver calls for C, which run in place of its steps.

A list ends where a function of torch's stands, and another begins behind it. The first one of a
call refuses to run in a capture.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from flux_megatron.symm import enqueue
from flux_megatron.symm.copy_engine import CopyEngine
from flux_megatron.symm.enqueue import MADE, STREAM, TABLE, Operand
from flux_megatron.symm.program import CallProgram
from flux_megatron.symm.steps import Launch, Move, Step, TorchCall

_ATTEMPTS = 8  # to make lists of a program: first its kernels must be compiled

Run = Callable[..., bool]
Made = tuple[tuple[int, ...], "torch.dtype | None"]


class Segment(NamedTuple):
    """The first list, None for an empty one; then functions of torch's, each with the list behind
    it.
    """

    first: Run | None
    rest: tuple[tuple[TorchCall, Run | None], ...]


class Lists(NamedTuple):
    """A program's segments, all that a call makes, and the names of its kernels."""

    segments: tuple[Segment, ...]
    made: tuple[Made, ...]
    launches: tuple[str, ...]


def lists_of(program: CallProgram, engine: CopyEngine) -> Lists | None:
    """Of a program, kept in it; None where Python must make the call."""
    segments = program.segments  # another thread, whose lists are there, may have forgotten them
    if program.lists is None and segments and program.attempts < _ATTEMPTS:
        program.attempts += 1
        try:
            program.lists = _Builder(program, engine).lists(segments)
            program.forget_steps()
        except _NotCompiled as error:
            program.unlisted = str(error)
        except Exception as error:  # what the driver or Triton has otherwise than we know it
            program.unlisted, program.attempts = repr(error), _ATTEMPTS
            _say(program.unlisted)
    return program.lists


class _NotCompiled(Exception):
    """A later call finds the kernel."""


@cache
def _say(reason: str) -> None:
    warnings.warn(
        f"flux_megatron: Python makes the driver calls of a call, which takes the host longer: "
        f"{reason}",
        stacklevel=2,
    )


def of_torch_alone(program: CallProgram) -> Lists:
    """Of a program whose steps are all torch's and the host's: nothing is C's to run."""
    made: list[Segment] = []
    for segment in program.segments:
        steps = (step for _, steps in segment for step in steps)
        calls = ((step, None) for step in steps if isinstance(step, TorchCall))
        made.append(Segment(None, tuple(calls)))
    return Lists(tuple(made), program.made, ())


class _Builder:
    def __init__(self, program: CallProgram, engine: CopyEngine) -> None:
        self._program, self._engine = program, engine
        self._made, self._launches = [*program.made], list[str]()
        self._words = sum(one.words for one in program.channels)

    def lists(self, blocks_of: list[list[tuple[str, list[Step]]]]) -> Lists:
        segments = tuple(
            self._segment([step for _, steps in blocks for step in steps], begins=not number)
            for number, blocks in enumerate(blocks_of)
        )
        return Lists(segments, tuple(self._made), tuple(self._launches))

    def _segment(self, steps: list[Step], begins: bool) -> Segment:
        stops = [at for at, step in enumerate(steps) if isinstance(step, TorchCall)]
        ends = [*stops, len(steps)]
        first = self._list(steps[: ends[0]])
        refuses = begins and self._program.follows  # not plain collectives
        if refuses:
            first.make_eager()
        behind = [self._list(steps[at + 1 : end]) for at, end in zip(stops, ends[1:], strict=True)]
        torch_calls = [step for step in steps if isinstance(step, TorchCall)]
        runs = [one.run if len(one) else None for one in behind]
        rest = tuple(zip(torch_calls, runs, strict=True))
        return Segment(first.run if refuses or len(first) else None, rest)

    def _list(self, steps: list[Step]):
        made = enqueue.native().List(self._engine.index, self._words)
        operations_of, moves = self._engine.list_streams.operations, []
        for step in steps:
            if isinstance(step, Move):
                moves += operations_of(step.method, *step.operands)
                continue
            assert isinstance(step, Launch), f"{step} in a list"
            made.add(moves)
            moves = []
            arguments = step.launcher.native(step, self._scratch)
            if arguments is None:
                raise _NotCompiled(f"{step.launcher.name} is not compiled yet")
            made.launch(STREAM, *arguments)
            self._launches.append(step.launcher.name)
        made.add(moves)
        return made

    def _scratch(self, size: int) -> Operand:
        assert MADE + len(self._made) < TABLE, f"more than {TABLE - MADE} tensors"
        self._made.append(((size,), torch.int8))
        return Operand(MADE + len(self._made) - 1)
