"""Fits `all_reduce` to the rows of 2 x H200: layers without sequence parallelism, and decoding.

    python -m flux_megatron.perf.all_reduce_fits docs/results/h200x2 [--page docs/simulator.md]

prints the numbers, and renews the table of a page: each time predicted by numbers that were fitted
without the rows of its model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from flux_megatron.perf.all_reduce import Protocol, all_reduce_us, moved_bytes
from flux_megatron.perf.hardware import H200
from flux_megatron.perf.least_squares import Row, fit

LAYERS = ("all_reduced.jsonl", "all_reduced_connections-1.jsonl")
DECODING = "gemv_ar.jsonl"
FEW_BYTES = 2 * 2**20  # what a rank sends; no row is between 1.6 and 4.2 MB
EAGER = ("", "_graph")
MEGATRON = ("megatron", "sequential")  # a backward with its all-reduce behind wgrad


class Case(NamedTuple):
    """An operation of a model, and its all-reduce of `size_bytes`; `us` by candidate."""

    model: str
    connections: str
    backward: bool
    size_bytes: int
    world_size: int
    us: dict[str, float]

    @property
    def moved(self) -> float:
        return moved_bytes(self.size_bytes, self.world_size)

    def alone_us(self) -> Iterator[float]:
        """What the all-reduce takes behind the GEMM, eager and in a graph."""
        for how in EAGER:
            if f"serial{how}" in self.us:
                both = self.us[f"serial{how}"], self.us.get(f"serial_again{how}", 0.0)
                yield min(one for one in both if one) - self.us["gemm"]

    def exposed(self) -> Iterator[tuple[float, float]]:
        """What it adds to dgrad and wgrad, and that as a share of what it takes alone."""
        for name in MEGATRON:
            for how, alone in zip(EAGER, self.alone_us(), strict=False):
                more = self.us[name + how] - self.us["gemm"]
                yield more, more / alone


def load(folder: Path) -> list[Case]:
    """Of all files."""
    found: dict[tuple, Case] = {}
    for row in _rows(folder, LAYERS):
        where = row["provenance"]
        if row["status"] != "ok" or row["pattern"] not in ("gemm_ar", "backward_ar"):
            continue
        backward = row["pattern"] == "backward_ar"
        columns = row["K_local" if backward else "N_local"]
        key = row["suite"], where["max_connections"], backward, row["op"], row["M"]
        made = Case(*key[:3], 2 * row["M"] * columns, where["world_size"], {})
        found.setdefault(key, made).us[row["candidate"]] = row["median_us"]
    names = {"mm alone": "gemm", "mm + all-reduce": "serial"}
    for row in _rows(folder, [DECODING]):
        if row["table"] != "gemv_ar" or row["candidate"] not in names or "us" not in row:
            continue
        known = row["case"], row["max_connections"], row["M"]
        size_bytes = 2 * row["M"] * row["N"]
        made = Case(known[0].split()[0], known[1], False, size_bytes, row["world_size"], {})
        found.setdefault(known, made).us[names[row["candidate"]]] = row["us"]
    return [*found.values()]


def _rows(folder: Path, files: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    for file in files:
        for line in (folder / file).read_text().splitlines():
            yield json.loads(line)


def protocols(cases: Sequence[Case]) -> tuple[Protocol, Protocol]:
    """What `all_reduce.PROTOCOLS` is."""
    few: list[Row] = []
    many: list[Row] = []
    for case in cases:
        if not case.backward:
            terms = {"call": 1.0, "moved": case.moved * 1e-3}
            (few if case.moved < FEW_BYTES else many).extend((terms, us) for us in case.alone_us())
    return _protocol(fit(few)), _protocol(fit(many))


def _protocol(costs: Mapping[str, float]) -> Protocol:
    share = 1 / (costs["moved"] * H200.nccl_gbps)
    return Protocol(round(costs["call"], 1), round(share, 2))


def exposures(cases: Sequence[Case]) -> dict[str, float]:
    """What `all_reduce.EXPOSED` is: medians, as single long backwards differ from themselves by
    more than their all-reduce.
    """
    return {
        connections: round(
            median(
                share
                for case in cases
                if case.backward and case.connections == connections
                for _, share in case.exposed()
            ),
            2,
        )
        for connections in ("unset", "1")
    }  # fmt: skip


def errors(cases: Sequence[Case]) -> dict[str, list[float]]:
    """Predicted / measured - 1 without the rows of the case's model, by what is predicted: the
    all-reduce alone, and dgrad and wgrad, as measured, with what of it is exposed.
    """
    found: dict[str, list[float]] = {}
    for model in {case.model: None for case in cases}:
        others = [case for case in cases if case.model != model]
        known, share = protocols(others), exposures(others)
        for case in (case for case in cases if case.model == model):
            predicted = all_reduce_us(H200, case.size_bytes, case.world_size, known)
            if case.backward:
                name = f"exposed beside wgrad, connections {case.connections}"
                total = case.us["gemm"] + share[case.connections] * predicted
                found.setdefault(name, []).extend(
                    total / (case.us["gemm"] + more) - 1 for more, _ in case.exposed()
                )
            else:
                size = "below 2 MiB" if case.moved < FEW_BYTES else "from 4 MB"
                found.setdefault(f"alone, {size}", []).extend(
                    predicted / us - 1 for us in case.alone_us()
                )
    return found


def table(cases: Sequence[Case]) -> str:
    lines = [
        "| all-reduce | times | error, held out | median, without sign |",
        "| --- | --- | --- | --- |",
    ]
    for name, found in sorted(errors(cases).items()):
        span = f"{min(found):+.0%} to {max(found):+.0%}"
        lines.append(f"| {name} | {len(found)} | {span} | {median(map(abs, found)):.1%} |")
    return "\n".join(lines)


def main() -> None:
    from flux_megatron.perf.calibration import renew

    parser = argparse.ArgumentParser(prog="python -m flux_megatron.perf.all_reduce_fits")
    parser.add_argument("folder", type=Path, help=f"of {', '.join(LAYERS)} and {DECODING}")
    parser.add_argument("--page", type=Path, help="the Markdown page whose table is renewed")
    given = parser.parse_args()
    cases = load(given.folder)
    print(*protocols(cases), exposures(cases), table(cases), sep="\n")
    if given.page:
        page = renew(given.page.read_text(), "all-reduces", table(cases))
        given.page.write_text(page)


if __name__ == "__main__":
    main()
