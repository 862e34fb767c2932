"""Fits the costs of Embedding + All-to-All and of expert parallelism to the rows of 2 x H200.

    python -m flux_megatron.perf.operation_fits docs/results/h200x2 [--page docs/simulator.md]

prints the costs that `embedding_cost` and `expert_cost` hold, and renews the tables of a page: each
operation predicted by costs that were fitted without the rows of its case.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from flux_megatron.perf import expert_cost
from flux_megatron.perf.embedding_cost import Lookup
from flux_megatron.perf.expert_cost import OPERATIONS, Experts
from flux_megatron.perf.gemm import ELEMENT_BYTES
from flux_megatron.perf.least_squares import Terms, fit, total

# Of the models in expert_parallel.jsonl: hidden, ffn, experts of all ranks, top-k.
MODELS = {
    "mixtral": (4096, 14336, 8, 2),
    "fine 2048": (2048, 2048, 64, 8),
    "fine 7168": (7168, 2048, 64, 8),
}
GRAPH = " in a graph"
# Costs are of these commits' rows, whatever rows come after them.
COMMITS = ("5cf6837", "967b711", "f93af2e")

Costs = dict[str, dict[str, float]]


class Measured(NamedTuple):
    """One case: what it has of each term, and the measured us by candidate."""

    name: str
    operation: str
    terms: dict[str, float]
    times_us: dict[str, float]


class Error(NamedTuple):
    """Of a candidate: the cases, and the least and the largest predicted / measured - 1."""

    operation: str
    candidate: str
    cases: int
    low: float
    high: float


def embedding_cases(rows: Iterable[Mapping[str, Any]]) -> list[Measured]:
    """Forward, replayed from graphs."""
    found: dict[str, Measured] = {}
    for row in rows:
        if row["direction"] != "forward" or not row["candidate"].endswith(GRAPH):
            continue
        element = ELEMENT_BYTES[row["dtype"]]
        tables = row["tables"] // row["world_size"]
        lookup = Lookup(row["batch"], tables, row["pooling"], row["D"], element)
        name = f"{row['batch']} x {row['tables']} x {row['pooling']} {row['dtype']}"
        remote = lookup.pooled_bytes * (row["world_size"] - 1) / row["world_size"]
        terms = lookup.terms | {"remote_bytes": remote * 1e-3, "call": 1.0}
        case = found.setdefault(name, Measured(name, "embedding_a2a", terms, {}))
        case.times_us[row["candidate"].removesuffix(GRAPH)] = row["median_us"]
    return [*found.values()]


def expert_cases(rows: Iterable[Mapping[str, Any]]) -> list[Measured]:
    """Each with the counts that are expected of its router."""
    found = []
    for row in rows:
        if row["operation"] not in OPERATIONS or row["model"] not in MODELS:
            continue
        hidden, ffn, experts, topk = MODELS[row["model"]]
        ranks, leave = row["world_size"], row["tokens"] * topk
        to_busiest = row["skew"] + (1 - row["skew"]) / ranks
        N, K = (ffn, hidden) if row["operation"] == "a2a_gemm" else (hidden, ffn)
        one = Experts(
            ranks, experts // ranks, leave, leave * ranks * to_busiest, N, K, hidden,
            ELEMENT_BYTES[row["dtype"]],
        )  # fmt: skip
        name = f"{row['model']} {row['tokens']} {row['skew']}"
        times_us = {candidate: median(times) for candidate, times in row["times_us"].items()}
        found.append(Measured(name, row["operation"], one.terms, times_us))
    return found


def expert_costs(cases: Sequence[Measured]) -> Costs:
    """What `expert_cost.COSTS` holds."""
    unfused = {
        "gemm": lambda us: us["gemm"],
        "a2a": lambda us: us["a2a"],
        "sort": lambda us: us["nccl"] - us["gemm"] - us["a2a"],
        "sync": lambda us: us["nccl + sync"] - us["nccl"],
    }
    costs = {
        part: fit([(expert_cost.of(part, case.terms), time(case.times_us)) for case in cases])
        for part, time in unfused.items()
    }
    for operation in OPERATIONS:
        own = [case for case in cases if case.operation == operation]
        costs[operation] = fit(
            [(expert_cost.of(operation, case.terms), case.times_us["fused"]) for case in own]
        )
    return costs


def embedding_costs(cases: Sequence[Measured], a2a: Terms) -> Costs:
    """What `embedding_cost` holds as LOOKUP, FUSED and LAYOUT; `a2a` is the cost of NCCL's."""
    names = ("entries", "row_bytes", "pooled_bytes")
    costs = {
        kind: fit([(_some(names, case.terms), case.times_us[kind]) for case in cases])
        for kind in ("lookup", "fused")
    }
    copied = []
    for case in cases:
        exchange = total(a2a, expert_cost.of("a2a", case.terms))
        more = case.times_us["library"] - case.times_us["lookup"] - exchange
        copied.append((_some(("pooled_bytes",), case.terms), more))
    return costs | {"layout": fit(copied)}


def expert_errors(cases: Sequence[Measured]) -> list[Error]:
    """Without all rows of the same model and number of tokens."""
    found: dict[tuple[str, str], list[float]] = {}
    for case in cases:
        group = case.name.rsplit(" ", 1)[0]
        costs = expert_costs([one for one in cases if one.name.rsplit(" ", 1)[0] != group])
        parts = {part: total(costs[part], expert_cost.of(part, case.terms)) for part in costs}
        unfused = parts["gemm"] + parts["a2a"] + parts["sort"]
        predicted = {
            "gemm": parts["gemm"], "a2a": parts["a2a"], "nccl": unfused,
            "nccl + sync": unfused + parts["sync"],
            "fused": max(parts[case.operation], parts["a2a"]),
        }  # fmt: skip
        for candidate, us in predicted.items():
            error = us / case.times_us[candidate] - 1
            found.setdefault((case.operation, candidate), []).append(error)
    return _errors(found)


def embedding_errors(cases: Sequence[Measured], a2a: Terms) -> list[Error]:
    found: dict[tuple[str, str], list[float]] = {}
    for case in cases:
        costs = embedding_costs([one for one in cases if one is not case], a2a)
        parts = {
            kind: total(costs[kind], _some(costs[kind], case.terms)) for kind in ("lookup", "fused")
        }
        copied = total(costs["layout"], _some(costs["layout"], case.terms))
        exchange = total(a2a, expert_cost.of("a2a", case.terms))
        predicted = parts | {"library": parts["lookup"] + copied + exchange}
        for candidate, us in predicted.items():
            error = us / case.times_us[candidate] - 1
            found.setdefault((case.operation, candidate), []).append(error)
    return _errors(found)


def _errors(found: Mapping[tuple[str, str], list[float]]) -> list[Error]:
    return [
        Error(*key, len(errors), min(errors), max(errors)) for key, errors in sorted(found.items())
    ]


def _some(names: Iterable[str], terms: Terms) -> dict[str, float]:
    return {name: terms[name] for name in names}


def load(folder: Path) -> tuple[list[Measured], list[Measured]]:
    """The cases of embeddings, and of experts."""
    embedding, experts = (
        [
            row
            for line in (folder / f"{name}.jsonl").read_text().splitlines()
            if (row := json.loads(line))["commit"] in COMMITS
        ]
        for name in ("embedding_a2a", "expert_parallel")
    )
    return embedding_cases(embedding), expert_cases(experts)


def table(errors: Iterable[Error]) -> str:
    lines = ["| operation | candidate | cases | error, held out |", "| --- | --- | --- | --- |"]
    for one in errors:
        span = f"{one.low:+.0%} to {one.high:+.0%}"
        lines.append(f"| `{one.operation}` | {one.candidate} | {one.cases} | {span} |")
    return "\n".join(lines)


def errors_table(folder: Path) -> str:
    embedding, experts = load(folder)
    a2a = expert_costs(experts)["a2a"]
    return table([*embedding_errors(embedding, a2a), *expert_errors(experts)])


def main() -> None:
    from flux_megatron.perf.calibration import renew

    parser = argparse.ArgumentParser(prog="python -m flux_megatron.perf.operation_fits")
    parser.add_argument(
        "folder", type=Path, help="of embedding_a2a.jsonl and expert_parallel.jsonl"
    )
    parser.add_argument("--page", type=Path, help="the Markdown page whose table is renewed")
    given = parser.parse_args()
    embedding, experts = load(given.folder)
    costs = expert_costs(experts)
    for name, one in (costs | embedding_costs(embedding, costs["a2a"])).items():
        print(name, {term: float(f"{cost:.5g}") for term, cost in one.items()})
    found = errors_table(given.folder)
    print(found)
    if given.page:
        given.page.write_text(renew(given.page.read_text(), "operations", found))


if __name__ == "__main__":
    main()
