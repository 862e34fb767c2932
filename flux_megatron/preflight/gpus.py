"""What the driver knows of a node's GPUs: their number, memory errors, NVLink, why clocks are held.

nvidia-smi is used and not NVML: it comes with every driver, into containers too.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial

from flux_megatron.preflight.finding import Finding, NotChecked, Status, output_of

ANSWER_S = 60  # a driver that is broken may hang
SMI = "nvidia-smi"
# field of nvidia-smi: the values of a sound GPU, and what another one means
MEMORY = {
    "ecc.errors.uncorrected.volatile.total": (
        "0",
        "uncorrected ECC errors since the driver started",
    ),
    "remapped_rows.pending": ("No", "rows of memory wait to be remapped by a reset"),
    "remapped_rows.failure": ("No", "a row of memory could not be remapped"),
}
HELD = {
    "clocks_throttle_reasons.hw_thermal_slowdown": ("Not Active", "clocks are held for its heat"),
    "clocks_throttle_reasons.hw_power_brake_slowdown": (
        "Not Active",
        "clocks are held by its board",
    ),
}
UNKNOWN = ("[N/A]", "N/A", "[Not Supported]", "")


def examine(count: int, link: str) -> Iterator[Finding]:
    """All queries; one without an answer is `not checked`, for a driver may not know it."""
    if shutil.which(SMI) is None:
        yield Finding("not checked", f"errors, links and clocks of GPUs: no {SMI}")
        return
    try:
        yield from _count(count)
    except NotChecked as error:  # which every driver knows: it hangs, or has lost a GPU
        yield Finding("unfit", f"GPUs: {error}")
        return
    for field, (sound, meaning) in {**MEMORY, **HELD}.items():
        yield from _guarded(meaning, partial(_field, field, sound, meaning))
    if link == "nvlink":
        yield from _guarded("NVLink state", _links)
        yield from _guarded("NVLink errors", _link_errors)


def _guarded(subject: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from look()
    except NotChecked as error:
        yield Finding("not checked", f"{subject}: {error}")


def _count(count: int) -> Iterator[Finding]:
    found = len(_rows("index"))
    status: Status = "ok" if found >= count else "unfit"
    yield Finding(status, f"{found} GPUs, {count} expected")


def _field(field: str, sound: str, meaning: str) -> Iterator[Finding]:
    rows = _rows(f"index,{field}")
    unknown = [index for index, value in rows if value in UNKNOWN]
    wrong = [(index, value) for index, value in rows if value not in (*UNKNOWN, sound)]
    for index, value in wrong:
        yield Finding("unfit", f"GPU {index}: {meaning}: {value}")
    if unknown:
        yield Finding("not checked", f"{meaning}: GPU {', '.join(unknown)} has no {field}")
    elif not wrong:
        yield Finding("ok", f"{field} is {sound} on all GPUs")


def _links() -> Iterator[Finding]:
    """A link that is down shows as inactive; some boards have such by design, on all GPUs alike."""
    active = {
        gpu: sum("GB/s" in line for line in lines) for gpu, lines in _of_gpus("--status").items()
    }
    most = max(active.values(), default=0)
    low = {gpu: count for gpu, count in active.items() if count < most or most == 0}
    for gpu, count in low.items():
        yield Finding("unfit", f"GPU {gpu}: {count} active NVLinks, others {most}")
    if not active:
        raise NotChecked(f"{SMI} nvlink --status names no GPU")
    if not low:
        yield Finding("ok", f"{most} active NVLinks on every GPU")


def _link_errors() -> Iterator[Finding]:
    """A recovery is a link that had been lost; replays and CRC errors alone were made good."""
    total = 0
    for gpu, lines in _of_gpus("--errorcounters").items():
        for line in lines:
            match = re.search(r"Link (\d+): (.+?) Errors?: (\d+)", line)
            if match is None:
                continue
            number, kind, count = match[1], match[2], int(match[3])
            total += 1
            if count:
                status: Status = "unfit" if "recovery" in kind.lower() else "note"
                yield Finding(status, f"GPU {gpu}: NVLink {number}: {count} {kind} errors")
    if not total:
        raise NotChecked(f"{SMI} nvlink --errorcounters shows no counter")
    yield Finding("ok", f"{total} counters of NVLink errors read")


def _of_gpus(question: str) -> dict[str, list[str]]:
    """The lines below each "GPU N:"."""
    found: dict[str, list[str]] = {}
    for line in output_of([SMI, "nvlink", question], ANSWER_S).splitlines():
        if head := re.match(r"GPU (\d+):", line):
            lines = found.setdefault(head[1], [])
        elif found:
            lines.append(line)
    return found


def _rows(fields: str) -> list[list[str]]:
    """The fields of each GPU. A driver refuses the whole query if it does not know one field."""
    text = output_of([SMI, f"--query-gpu={fields}", "--format=csv,noheader,nounits"], ANSWER_S)
    return [
        [cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()
    ]
