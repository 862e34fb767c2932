"""Rows of measurements: one JSON object a line, one row a case and candidate. No torch.

A row has everything that its time depends on, and neither a host's name nor a path.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from flux_megatron.errors import BadInput

if TYPE_CHECKING:
    from pydantic import TypeAdapter

LIBRARY, OURS, COMPETITOR = "library", "ours", "peer"  # roles of candidates, as rows spell them
WRITTEN_BY = "a file that `flux-megatron bench` has written expected"
OK, WRONG, FAILED, UNSUPPORTED, MISSING = "ok", "wrong", "failed", "unsupported", "missing"


@dataclass(frozen=True)
class Provenance:
    """What is the same for all rows of a run but the clocks, taken after each case on rank 0.

    `nvls` says whether NVLink multicast was allowed; `max_connections` is
    CUDA_DEVICE_MAX_CONNECTIONS or "unset".
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    run: str
    date: str
    commit: str
    gpu: str
    driver: str
    cuda: str
    torch: str
    triton: str
    nccl: str
    nvls: str
    max_connections: str
    world_size: int
    dtype: str
    scale: int
    clock_mhz: int | None
    power_w: float | None
    power_limit_w: float | None


@dataclass(frozen=True)
class Row:
    """One candidate on one case.

    `status` is `ok`, or why there are no times: `wrong` (see `errors` and `allowed`), `failed`,
    `unsupported` (by a strategy of ours) or `missing` (a competitor that is not installed).

    M, N_local and K_local are the GEMM of one rank, as it is after gathering. `times_us` has the
    slowest rank of every round. `host_us` is the host's time for one call.

    `beside`: all its times, those of the baselines too, are of calls beside all-reduces of another
    communicator. The `reason` of an `ok` row says in how many rounds those ended before the call.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    suite: str
    pattern: str
    op: str
    layout: str
    M: int
    N_local: int
    K_local: int
    candidate: str
    role: str
    status: str
    reason: str
    errors: list[float | None]
    allowed: list[float | None]
    times_us: list[float]
    median_us: float | None
    min_us: float | None
    p20_us: float | None
    p80_us: float | None
    gemm_us: float | None
    serial_us: float | None
    efficiency: float | None
    host_us: float | None
    plan: dict[str, Any] | None
    provenance: Provenance
    beside: bool = False

    @property
    def case(self) -> tuple[str, str, str, int]:
        return self.suite, self.pattern, self.op, self.M


def append(path: Path, rows: Iterable[Row]) -> None:
    """Add rows to a file; whole lines only, so that a run can stop between two calls."""
    text = "".join(json.dumps(asdict(row), separators=(",", ":")) + "\n" for row in rows)
    with path.open("a") as file:
        file.write(text)


def load(path: Path) -> list[Row]:
    """Every row of a file but those of other tables. `BadInput` names the line that is none."""
    return [_row(values, place) for values, place in lines(path) if "table" not in values]


def load_tables(path: Path) -> list[dict[str, Any]]:
    """The other rows of a file, which name their table. `BadInput` as for `load`."""
    return [values for values, _ in lines(path) if "table" in values]


def load_all(paths: Iterable[Path]) -> tuple[list[Row], list[dict[str, Any]]]:
    """What `load` and `load_tables` give of all files; `BadInput` where that is nothing."""
    paths = [*paths]
    rows = [row for path in paths for row in load(path)]
    tables = [row for path in paths for row in load_tables(path)]
    if not rows and not tables:
        raise BadInput(f"{_named(paths)}: no rows, {WRITTEN_BY}")
    return rows, tables


def load_layers(paths: Iterable[Path]) -> list[Row]:
    """What `load` gives of all files; `BadInput` where that is nothing."""
    paths = [*paths]
    rows, tables = load_all(paths)
    if not rows:
        found = ", ".join(sorted({str(row["table"]) for row in tables}))
        raise BadInput(f"{_named(paths)}: only rows of {found}, {WRITTEN_BY}")
    return rows


def lines(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Objects, and where they stand. `BadInput` for a file or a line that has none."""
    try:
        text = path.read_text()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise BadInput(f"{path}: {reason}; {WRITTEN_BY}") from None
    except UnicodeDecodeError:
        raise BadInput(f"{path}: not text; {WRITTEN_BY}") from None
    for number, line in enumerate(text.splitlines(), 1):
        place = f"{path} line {number}"
        try:
            values = json.loads(line)
        except ValueError:
            raise BadInput(f"{place}: {line[:40]!r} is not JSON, a row expected") from None
        if not isinstance(values, dict):
            raise BadInput(f"{place}: {line[:40]!r} given, a row expected")
        yield values, place


def _named(paths: Iterable[Path]) -> str:
    return ", ".join(map(str, paths))


@cache
def _checked() -> TypeAdapter[Row]:
    from pydantic import TypeAdapter

    return TypeAdapter(Row)


def _row(values: dict[str, Any], place: str) -> Row:
    from pydantic import ValidationError

    try:
        return _checked().validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        names = ", ".join(field.name for field in fields(Row))
        raise BadInput(
            f"{place}: {field}: {first['msg'].lower()}; a row with {names} expected"
        ) from None


def latest(
    rows: Iterable[Row], beside: bool = False
) -> dict[tuple[str, tuple[str, str, str, int]], dict[str, Row]]:
    """Rows by (max_connections, case) and candidate: all of the run that measured the case last,
    of those alone or of those beside others.
    """
    newest: dict[tuple[str, tuple[str, str, str, int]], dict[str, Row]] = {}
    for row in rows:
        if row.beside != beside:
            continue
        group = newest.setdefault((row.provenance.max_connections, row.case), {})
        if any(other.provenance.run != row.provenance.run for other in group.values()):
            group.clear()
        group[row.candidate] = row
    return newest
