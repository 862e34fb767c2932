"""An arm of `--flux-compare` that computes nothing right: megatron-core's layers with the
collectives of tensor and expert parallelism left out. Its time is what could be gained at most.

Where another rank's rows or sums would come from, a copy of this rank's own stands: numbers of such
sizes draw as much power. Each iteration says how long its copies took, which nobody who trains
waits for.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flux_megatron.integration import arm, comparison

_left_out = False
_copied: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # begin and end, of one iteration


class _Done:
    """The work of a collective that is not made."""

    def wait(self) -> bool:
        return True


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Iterations whose tensor- and expert-parallel groups do not communicate."""
    global _left_out
    if _copied:  # by the last one, which has ended
        took = sum(begin.elapsed_time(end) for begin, end in _copied)
        print(f"without_collectives: copies took {took:.3f} ms", flush=True)
        _copied.clear()
    with arm.use(stock=True):
        _left_out = True
        try:
            yield
        finally:
            _left_out = False


def _gathered(out: Tensor, rows: Tensor) -> None:
    out.view(-1, *rows.shape).copy_(rows)


def _reduced(out: Tensor, rows: Tensor) -> None:
    out.copy_(rows.view(-1, *out.shape)[0])


def _exchanged(out: Tensor, rows: Tensor) -> None:
    """As many rows as would come."""
    for part in out.split(max(len(rows), 1)):
        part.copy_(rows[: len(part)])


def _nothing(tensor: Tensor) -> None:
    pass


_COPIES: dict[str, Callable[..., None]] = {
    "all_gather_into_tensor": _gathered, "reduce_scatter_tensor": _reduced, "all_reduce": _nothing,
    "all_to_all_single": _exchanged,
}  # fmt: skip


def add() -> None:
    """Let comparisons have this arm behind stock and ours. Before megatron-core is imported, which
    keeps what torch.distributed has.
    """
    comparison.ARMS = (*comparison.ARMS, left_out)
    for name, copies in _COPIES.items():
        setattr(dist, name, _or_copies(getattr(dist, name), copies))


def _or_copies(original: Callable[..., Any], copies: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def collective(*given: Any, **named: Any) -> Any:
        if not (_left_out and _is_left_out(named.get("group"))):
            return original(*given, **named)
        tensors = [one for one in (*given, *named.values()) if isinstance(one, Tensor)]
        with _timed(tensors[0]):
            copies(*tensors)
        return _Done() if named.get("async_op") else None

    return collective


@contextlib.contextmanager
def _timed(out: Tensor) -> Iterator[None]:
    if not out.is_cuda:
        yield
        return
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    yield
    end.record()
    _copied.append((begin, end))


def _is_left_out(group: Any) -> bool:
    """Counts of experts' rows go over other groups, and stay."""
    from megatron.core import parallel_state

    left_out = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_expert_model_parallel_group(check_initialized=False),
    )
    return group is not None and any(group is one for one in left_out)
