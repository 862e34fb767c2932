"""FLUX_MEGATRON_ENABLE=1: `flux_megatron.enable()` in processes whose program does not call it.

torch imports this package in every process (the entry point of its `torch.backends`), and
`import flux_megatron` does the same. Megatron may be imported later, or be in the midst of it, so
`enable()` is called where every program begins with it: in `initialize_model_parallel`.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

PARALLEL_STATE = "megatron.core.parallel_state"
INITIALIZE = "initialize_model_parallel"


class _Watch:
    """On sys.meta_path; it finds nothing, but sees that something is imported."""

    def find_spec(self, *_: Any, **__: Any) -> None:
        _wrap()


_watch = _Watch()


def arm() -> None:
    """Enable our layers as soon as Megatron's groups are made; at once where they are. Another
    call changes nothing.
    """
    if _watch not in sys.meta_path and not _wrap():
        sys.meta_path.insert(0, _watch)


def disarm() -> None:
    """For processes that `--flux-overlap` has given their layers."""
    if _watch in sys.meta_path:
        sys.meta_path.remove(_watch)
    initialize: Any = getattr(sys.modules.get(PARALLEL_STATE), INITIALIZE, None)
    if hasattr(initialize, "enables"):
        setattr(sys.modules[PARALLEL_STATE], INITIALIZE, initialize.__wrapped__)


def _wrap() -> bool:
    """Whether Megatron's module is far enough for it."""
    parallel_state: Any = sys.modules.get(PARALLEL_STATE)
    original = getattr(parallel_state, INITIALIZE, None)
    if original is None:
        return False
    if hasattr(original, "enables"):
        return True
    if parallel_state.model_parallel_is_initialized():
        _enable()
        return True

    @functools.wraps(original)
    def initialize_model_parallel(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        _enable()
        return result

    initialize_model_parallel.enables = True  # type: ignore[attr-defined]
    setattr(parallel_state, INITIALIZE, initialize_model_parallel)
    return True


def _enable() -> None:
    disarm()
    from flux_megatron.integration.enabling import enable

    enable()
