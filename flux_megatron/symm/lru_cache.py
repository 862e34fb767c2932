"""A cache of bounded size: a training run may make another shape in every micro-batch."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

LIMIT = 256
_get = dict.get


class LRUCache(OrderedDict[K, V]):
    """At most `limit` entries: a new one replaces the entry that was set, or got by `get`, longest
    ago.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        super().__init__()
        self._limit = limit

    def get(self, key: K, default: V | None = None) -> V | None:  # type: ignore[override]
        value = _get(self, key)
        if value is None:
            return default
        try:  # noqa: SIM105, half a microsecond
            self.move_to_end(key)
        except KeyError:  # another thread has just dropped it
            pass
        return value

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self._limit and key not in self:
            self.popitem(last=False)
        super().__setitem__(key, value)
