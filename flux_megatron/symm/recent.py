"""A cache of bounded size: a training run may make another shape in every micro-batch."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

LIMIT = 256


class Recent(dict[K, V]):
    """At most `limit` entries: a new one replaces the entry that was set, or got by `get`, longest
    ago.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        super().__init__()
        self._limit = limit

    def get(self, key: K, default: V | None = None) -> V | None:  # type: ignore[override]
        value = super().get(key)
        if value is None:
            return default
        super().pop(key, None)
        super().__setitem__(key, value)
        return value

    def __setitem__(self, key: K, value: V) -> None:
        if key not in self and len(self) >= self._limit:
            self.pop(next(iter(self)))
        super().__setitem__(key, value)
