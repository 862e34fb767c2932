"""Every scalar of an experiment is either stated by a source or assumed for a reason."""

from __future__ import annotations

from collections.abc import Iterable

from flux_megatron.launch.experiment_error import ErrorDetail
from flux_megatron.launch.inheritance import Merged, Source, covers


def of(scalars: Iterable[str], merged: Merged) -> tuple[dict[str, Source], list[ErrorDetail]]:
    """The source of each scalar: that of the longest key which covers it.

    A file that sets a value gives its own reason: that of its base is of another value.
    """
    found: dict[str, Source] = {}
    errors: list[ErrorDetail] = []
    unused = dict(merged.sources)
    for key in scalars:
        value = merged.values.get(key)
        covering = [source for source in merged.sources.values() if covers(source.key, key)]
        for source in covering:
            unused.pop(source.key, None)
        fresh = [source for source in covering if not value or source.order >= value.order]
        if fresh:
            found[key] = max(fresh, key=lambda source: len(source.key))
        else:
            old = f" here; what {covering[0].file} says is of another value" if covering else ""
            where = value.file if value else ""
            errors.append(ErrorDetail(where, key, f"neither stated nor assumed{old}"))
    errors += [
        ErrorDetail(source.file, f"{source.kind}.{key}", "there is no such value")
        for key, source in unused.items()
    ]
    return found, errors
