"""Every scalar of an experiment is either stated by a source or assumed for a reason."""

from __future__ import annotations

from collections.abc import Iterable

from flux_megatron.launch.complaint import Complaint
from flux_megatron.launch.inheritance import Merged, Source, covers


def of(scalars: Iterable[str], merged: Merged) -> tuple[dict[str, Source], list[Complaint]]:
    """The source of each scalar: that of the longest key which covers it.

    A file that sets a value says why itself: what its base says is of another value.
    """
    found: dict[str, Source] = {}
    complaints: list[Complaint] = []
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
            complaints.append(Complaint(where, key, f"neither stated nor assumed{old}"))
    complaints += [
        Complaint(source.file, f"{source.kind}.{key}", "there is no such value")
        for key, source in unused.items()
    ]
    return found, complaints
