"""FLUX_MEGATRON_ENABLE=1: `flux_megatron.enable()` in processes whose program does not call it.

torch imports this package in every process (the entry point of its `torch.backends`), and
`import flux_megatron` does the same. Megatron may be imported later, or be in the midst of it, so
`enable()` is called where every program begins with it: before `initialize_model_parallel`, or
before the first module where a program has groups of its own and never calls that.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

from flux_megatron import settings
from flux_megatron.integration.replaced import around, put

PARALLEL_STATE = "megatron.core.parallel_state"
INITIALIZE = "initialize_model_parallel"
MODULES = "megatron.core.transformer.module"


class _Watch:
    """On sys.meta_path; it finds nothing, but sees that something is imported."""

    def find_spec(self, *_: Any, **__: Any) -> None:
        _wrap()


_watch = _Watch()
_begun: set[str] = set()  # names of functions that ours are around, until `_undo` closes
_undo = contextlib.ExitStack()
_waiting: Callable[[], object] | None = None  # for Megatron to begin
_enabled = False  # when it had begun
made = 0  # layers that `enable()` has made ours


def arm(enable: Callable[[], object]) -> None:
    """Call `enable` as soon as Megatron begins; at once where its groups are made. Another call
    changes nothing.
    """
    global _waiting
    if _waiting is None:
        _waiting = enable
        atexit.register(_end, os.getpid())
        put(sys, "meta_path", [_watch, *sys.meta_path])
        _wrap()


def disarm() -> None:
    """Whoever calls it has said which layers are ours."""
    global _waiting
    _waiting = None
    _watch_no_more()
    _begun.clear()
    _undo.close()


def _watch_no_more() -> None:
    put(sys, "meta_path", [finder for finder in sys.meta_path if finder is not _watch])


def _wrap() -> None:
    """What Megatron begins with, as far as it is imported."""
    parallel_state: Any = sys.modules.get(PARALLEL_STATE)
    if hasattr(parallel_state, INITIALIZE):
        if parallel_state.model_parallel_is_initialized():
            _enable()
            return
        _begin_with(parallel_state, INITIALIZE)
    if module := getattr(sys.modules.get(MODULES), "MegatronModule", None):
        _begin_with(module, "__init__")
    if len(_begun) == 2:
        _watch_no_more()


def _begin_with(holder: Any, name: str) -> None:
    if name in _begun:
        return

    @around(holder, name, _undo)
    def beginning(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        outermost = getattr(holder, name) is ours
        if _waiting:
            _enable()  # which may change this very function
        return (getattr(holder, name) if outermost else original)(*args, **kwargs)

    ours = getattr(holder, name)
    _begun.add(name)


def _enable() -> None:
    global _enabled
    enable = _waiting
    disarm()  # first: what follows imports
    assert enable is not None, "nothing waits for Megatron to begin"
    enable()
    _enabled = True


def failed() -> bool:
    """Whether an error ends the program."""
    return hasattr(sys, "last_value")


def _end(armed_in: int) -> None:
    """Say that nothing came of the variable. In strict mode that ends a rank with status 1."""
    if os.getpid() != armed_in or failed() or not (why := _unused()):
        return
    loaded, runs = PARALLEL_STATE in sys.modules, _has_groups()
    if not runs and (not loaded or multiprocessing.parent_process() is not None):
        return  # a tool, or a worker that loads data
    if os.environ.get("RANK", "0") == "0":
        said = f"FLUX_MEGATRON_ENABLE=1, but no layer of process {armed_in} is ours"
        print(f"flux_megatron: {said}: {why}", flush=True)
    if settings.get().strict and loaded and (runs or "RANK" in os.environ):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # an error changes no status any more


def _unused() -> str:
    """Why no layer became ours; "" where some did, and where the program chose by itself."""
    if _waiting and PARALLEL_STATE not in sys.modules:
        return "megatron-core was not imported"
    if _waiting:
        return "megatron-core made no groups and no module"
    if _enabled and not made:
        return "megatron-core built none of the layers that ours stand for"
    return ""


def _has_groups() -> bool:
    distributed: Any = sys.modules.get("torch.distributed")
    return bool(distributed and distributed.is_available() and distributed.is_initialized())
