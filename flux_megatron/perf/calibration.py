"""Fits the cost model's constants to measured rows, and reports the errors on rows left out.

`python -m flux_megatron.perf.calibration ROWS... [--out FILE] [--page FILE]` prints the constants
and, for every model, M and strategy, the linear layers' measured and predicted time, with that
model and M left out of the fit. `--out` writes these as JSON lines, `--page` renews the tables of
a Markdown page between their marks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from flux_megatron.patterns import COLUMN, ROW, Pattern
from flux_megatron.perf.constants import Constants, Exposure
from flux_megatron.perf.gemm import gemm_us, wgrad_us
from flux_megatron.perf.hardware import H200
from flux_megatron.perf.linear import Platform, operator_us
from flux_megatron.perf.operator_cost import collective_us, moved_bytes
from flux_megatron.perf.rows import CANDIDATES, LAYERS, Row, cell, load, of_layer

HELD_OUT_M = (2048, 4096, 8192)
CONNECTIONS = ("unset", "1")
LIBRARIES = ("te", "async_tp")

# Before any fit: library tiles at the full-wave rate, and communication that costs nothing.
START = Constants(
    gemm_rate=1.0,
    tile_us=0.0,
    accumulate=1.0,
    hidden=0.0,
    call_overhead_us={"hopper": 0.0, "pipelined": 0.0, "fused": 0.0},
    megatron_backward=dict.fromkeys(CONNECTIONS, 0.0),
    exposures={
        (library, one): Exposure(0.0, 0.0, 0.0) for library in LIBRARIES for one in CONNECTIONS
    },
)


def fit(rows: Sequence[Row]) -> Constants:
    """GEMMs first, then wgrad, then what each strategy adds to them."""
    gemms = [row for row in rows if row.candidate == "gemm"]
    forward = [row for row in gemms if not row.backward]
    backward = [row for row in gemms if row.backward]
    found = _descend(START, {"gemm_rate": 0.02, "tile_us": 1.0}, forward)
    found = _descend(found, {"accumulate": 0.4, "hidden": 0.2}, backward)
    megatron = {
        one: _share(rows, "megatron", Platform(H200, one, found), COLUMN.dual, backward=True)
        for one in CONNECTIONS
    }
    exposures = {
        (library, one): _exposure(rows, library, Platform(H200, one, found))
        for library in LIBRARIES
        for one in CONNECTIONS
    }
    return replace(
        found,
        call_overhead_us=_call_overheads(rows, found),
        megatron_backward=megatron,
        exposures=exposures,
    )


def _descend(start: Constants, steps: Mapping[str, float], gemms: Sequence[Row]) -> Constants:
    """The named constants of least error, by steps along each of them that get smaller."""
    best, least, share = start, _error(start, gemms), 1.0
    while share > 0.02:
        before = least
        for name, step in steps.items():
            for sign in (1, -1):
                value = round(getattr(best, name) + sign * share * step, 4)
                candidate = replace(best, **{name: value})
                if value >= 0 and (error := _error(candidate, gemms)) < least:
                    best, least = candidate, error
        share = share if least < before else share / 2
    return best


def _error(constants: Constants, gemms: Sequence[Row]) -> float:
    """Of the library's GEMM forward, or of dgrad and wgrad, in shares of the measured time."""
    total = 0.0
    for row in gemms:
        M, N, K = row.M, row.N_local, row.K_local
        if row.backward:
            predicted = gemm_us(H200, M, K, N, "bfloat16", constants)
            predicted += wgrad_us(H200, N, K, M, "bfloat16", constants)
        else:
            predicted = gemm_us(H200, M, N, K, "bfloat16", constants)
        total += abs(math.log(predicted / row.median_us))
    return total


def _call_overheads(rows: Sequence[Row], found: Constants) -> dict[str, float]:
    """How much longer each of our strategies takes than predicted without overhead: the mean over
    its rows.
    """
    call_overhead_us = dict(found.call_overhead_us)
    for strategy in ("hopper", "pipelined"):
        more = [
            row.median_us - operator_us(row.problem, strategy, Platform(H200, one, found))
            for one in CONNECTIONS
            for row in of_layer(rows, strategy, one)
        ]
        if more:
            call_overhead_us[strategy] = round(sum(more) / len(more), 1)
    return call_overhead_us | {
        "fused": call_overhead_us["pipelined"]
    }  # not measured at these sizes


def _exposure(rows: Sequence[Row], library: str, platform: Platform) -> Exposure:
    return Exposure(
        gather=_share(rows, library, platform, COLUMN, backward=False),
        scatter=_share(rows, library, platform, ROW, backward=False),
        column_backward=_share(rows, library, platform, COLUMN.dual, backward=True),
    )


def _share(
    rows: Sequence[Row], strategy: str, platform: Platform, pattern: Pattern, *, backward: bool
) -> float:
    """The share of all collectives' time that stays exposed; `platform` must predict none."""
    more, collectives = 0.0, 0.0
    for row in of_layer(rows, strategy, platform.connections):
        if row.backward is backward and row.problem.pattern is pattern:
            more += row.median_us - operator_us(row.problem, strategy, platform)
            one = collective_us(H200, moved_bytes(row.problem), row.world_size)
            collectives += 2 * one if backward else one
    return round(more / collectives, 3) if collectives else 1.0


@dataclass(frozen=True)
class Prediction:
    """The linear layers of one transformer layer: the sum over qkv, proj, fc1 and fc2 of forward
    and backward. `worst_operator` is the one of these eight that is furthest off.
    """

    model: str
    M: int
    strategy: str
    connections: str
    measured_us: float
    predicted_us: float
    error: float  # predicted / measured - 1
    worst_operator: str
    worst_error: float


def holdout(rows: Sequence[Row]) -> list[Prediction]:
    """Every model and M predicted by constants that were fitted without its rows."""
    found = []
    for model in sorted({row.model for row in rows}):
        for M in HELD_OUT_M:
            inside, outside = cell(rows, model, M)
            found += predictions(inside, fit(outside))
    return found


def predictions(rows: Sequence[Row], constants: Constants) -> list[Prediction]:
    """Of one model and M: each strategy whose whole layer was measured."""
    measured = {
        (strategy, one): of_layer(rows, strategy, one)
        for one in CONNECTIONS
        for strategy in CANDIDATES
    }
    return [
        _prediction(layer, strategy, Platform(H200, one, constants))
        for (strategy, one), layer in measured.items()
        if len(layer) == 2 * len(LAYERS)
    ]


def _prediction(layer: Sequence[Row], strategy: str, platform: Platform) -> Prediction:
    times = {row: operator_us(row.problem, strategy, platform) for row in layer}
    errors = {row: us / row.median_us - 1 for row, us in times.items()}
    worst = max(errors, key=lambda row: abs(errors[row]))
    measured, predicted = sum(row.median_us for row in layer), sum(times.values())
    return Prediction(
        layer[0].model, layer[0].M, strategy, platform.connections,
        round(measured, 1), round(predicted, 1), round(predicted / measured - 1, 4),
        f"{worst.op} {'backward' if worst.backward else 'forward'}", round(errors[worst], 4),
    )  # fmt: skip


def table(found: Sequence[Prediction]) -> str:
    """Markdown; a layer that is more than 5 % off stands in bold."""
    lines = [
        "| model | M | strategy | connections | measured us | predicted us | error | worst part |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in found:
        error = f"{one.error:+.1%}"
        lines.append(
            f"| {one.model} | {one.M} | {one.strategy} | {one.connections} | "
            f"{one.measured_us:.0f} | {one.predicted_us:.0f} | "
            f"{f'**{error}**' if abs(one.error) > 0.05 else error} | "
            f"{one.worst_operator} {one.worst_error:+.1%} |"
        )
    return "\n".join(lines)


def renew(page: str, name: str, text: str) -> str:
    """`page` with `text` between its marks. `ValueError` for a page without them."""
    start, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
    if start not in page or end not in page:
        raise ValueError(f"a page with {start.strip()} and {end.strip()} expected")
    before, after = page.split(start)[0], page.split(end)[1]
    return before + start + text + end + after


def main() -> None:
    import argparse

    from flux_megatron.perf import published

    parser = argparse.ArgumentParser(prog="python -m flux_megatron.perf.calibration")
    parser.add_argument("rows", nargs="+", type=Path, help="JSON lines of `flux-megatron bench`")
    parser.add_argument("--out", type=Path, help="where the predictions go, as JSON lines")
    parser.add_argument("--page", type=Path, help="the Markdown page whose tables are renewed")
    options = parser.parse_args()
    rows = load(options.rows)
    found = holdout(rows)
    tables = {
        "layers": table(found),
        "published": published.table(),
        "kernels": published.kernels_table(),
    }
    print(fit(rows), *tables.values(), sep="\n\n")
    if options.out:
        options.out.write_text("".join(json.dumps(asdict(one)) + "\n" for one in found))
    if options.page:
        page = options.page.read_text()
        for name, text in tables.items():
            page = renew(page, name, text)
        options.page.write_text(page)


if __name__ == "__main__":
    main()
