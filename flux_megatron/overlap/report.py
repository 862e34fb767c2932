"""Which calls ran: by pattern and strategy, and those that fell back, by reason."""

from __future__ import annotations

import functools
import os
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from flux_megatron import errors, settings
from flux_megatron.kernels.triton_launch import launches
from flux_megatron.symm.workspaces import workspaces

_calls: Counter[tuple[str, str]] = Counter()
_fallbacks: Counter[tuple[str, str]] = Counter()
_copies: Counter[tuple[str, str]] = Counter()
# of each model: its chunks, as long as they live, and its layers
_models: list[tuple[list[weakref.ref[Any]], Layers]] = []


@dataclass(frozen=True)
class Layers:
    """How many of the `total` tensor-parallel linear layers of models are `ours`, and how many
    `others` there are of each (name, reason).
    """

    ours: int
    total: int
    others: dict[tuple[str, str], int]

    def __add__(self, more: Layers) -> Layers:
        others = Counter(self.others) + Counter(more.others)
        return Layers(self.ours + more.ours, self.total + more.total, dict(others))

    def __str__(self) -> str:
        others = [f"{name} ({n}): {why}" for (name, why), n in sorted(self.others.items())]
        return f"{self.ours} of {self.total} tensor-parallel linear layers are ours" + (
            f"; not {', '.join(others)}" if others else ""
        )


@dataclass(frozen=True)
class Report:
    """`calls[pattern, strategy]` and `fallbacks[pattern, reason]` of this process since the last
    reset, and the `layers` of the models it trains together, None if they were not counted;
    `models` has those of each.

    A fallback counts as a `sequential` call too. The other `sequential` calls were chosen: by a
    measurement, by the rule or by the user. `workspace_bytes` is the symmetric memory that this
    rank holds. `kernels` counts launches: which of a strategy's kernels ran. `copies[what, reason]`
    counts calls that first copied operands which could have been read in place. What a graph
    repeats is not counted.
    """

    calls: dict[tuple[str, str], int]
    fallbacks: dict[tuple[str, str], int]
    workspace_bytes: int
    layers: Layers | None = None
    kernels: dict[str, int] = field(default_factory=dict)
    copies: dict[tuple[str, str], int] = field(default_factory=dict)
    models: tuple[Layers, ...] = ()

    @property
    def total(self) -> int:
        return sum(self.calls.values())

    @property
    def overlapped(self) -> int:
        return sum(n for (_, strategy), n in self.calls.items() if strategy != "sequential")

    @property
    def chosen_sequential(self) -> int:
        """Calls whose plan is `sequential`."""
        return self.total - self.overlapped - sum(self.fallbacks.values())

    @property
    def share(self) -> float:
        """The share of calls that overlapped; 1.0 if there was no call."""
        return self.overlapped / self.total if self.total else 1.0

    def __str__(self) -> str:
        chosen = self.chosen_sequential
        lines = [
            f"{self.overlapped} of {self.total} calls overlapped, "
            + (f"{chosen} sequential by their plan, " if chosen else "")
            + f"workspace {self.workspace_bytes / 2**20:.1f} MiB"
        ]
        alike = Counter(str(one) for one in self.models)
        for layers, n in alike.items():
            lines.append(f"  {layers}" if len(self.models) == 1 else f"  {_models_of(n)}: {layers}")
        lines += [f"  {p} {s}: {n}" for (p, s), n in sorted(self.calls.items())]
        lines += [
            f"  {p} fell back {n} times: {why}" for (p, why), n in sorted(self.fallbacks.items())
        ]
        lines += [
            f"  {what} copied {n} times: {why}" for (what, why), n in sorted(self.copies.items())
        ]
        if self.kernels:
            lines.append(
                "  kernels: " + ", ".join(f"{k} {n}" for k, n in sorted(self.kernels.items()))
            )
        return "\n".join(lines)


def _models_of(number: int) -> str:
    return f"{number} model" if number == 1 else f"{number} models"


def note_call(pattern: str, strategy: str) -> None:
    """Count a call that ran with `strategy`."""
    _calls[pattern, strategy] += 1


def note_fallback(pattern: str, reason: str) -> None:
    """Count a call that runs without overlap, and warn once for each reason; `FallbackRefused` in
    strict mode.
    """
    key = (pattern, reason)
    if settings.get().strict:
        raise errors.FallbackRefused(f"{pattern} cannot be overlapped: {reason}")
    if key not in _fallbacks:
        warnings.warn(f"flux_megatron: {pattern} runs without overlap: {reason}", stacklevel=3)
    _fallbacks[key] += 1
    note_call(pattern, "sequential")


def note_copy(what: str, reason: str) -> None:
    """Count a call that copies operands, and warn once for each reason."""
    if (what, reason) not in _copies:
        warnings.warn(f"flux_megatron: {what} are copied: {reason}", stacklevel=3)
    _copies[what, reason] += 1


def note_layers(layers: Layers, chunks: Iterable[Any] = ()) -> None:
    """Note the layers of one model, in place of what was noted of a chunk of it before."""
    kept = [weakref.ref(one) for one in chunks]
    forget_layers(chunks)
    _models.append((kept, layers))


def forget_layers(chunks: Iterable[Any]) -> None:
    """The layers of these models are ours no more."""
    gone = {id(one) for one in chunks}
    _models[:] = [one for one in _models if not any(id(chunk()) in gone for chunk in one[0])]


def report() -> Report:
    """The counts so far, and the symmetric memory held."""
    held = sum(workspace.size_bytes for workspace in workspaces())
    models = tuple(layers for _, layers in _models)
    layers = functools.reduce(Layers.__add__, models) if models else None
    counts = dict(launches), dict(_copies)
    return Report(dict(_calls), dict(_fallbacks), held, layers, *counts, models)


def reset_report() -> None:
    """Set the counts of calls to zero; those of layers stay."""
    _calls.clear()
    _fallbacks.clear()
    _copies.clear()
    launches.clear()


os.register_at_fork(after_in_child=reset_report)  # those were calls of the parent
