"""What `flux-megatron patterns` knows of each operation: the ranks of its exact tests, read from
the tests' own parameters, and the files of rows in which it is timed beside a baseline.

    python tests/pattern_evidence.py     # writes flux_megatron/bench/pattern_evidence.json

`tests/test_patterns.py` fails where that file says something else.
"""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
RESULTS = TESTS.parent / "docs" / "results"
EVIDENCE = TESTS.parent / "flux_megatron" / "bench" / "pattern_evidence.json"

# patterns, strategies, and the tests that compare them with the reference, without tolerance
EXACT = [
    ("ag_gemm gemm_rs", "fused pipelined sequential", "test_ops.py::test_exact"),
    ("ag_gemm gemm_rs gemm_ar", "signalled", "test_signalled.py::test_exact"),
    ("gemm_ar", "fused pipelined sequential", "test_gemm_ar.py::test_exact"),
    ("gemm_ar", "fused pipelined sequential", "test_gemm_ar.py::test_exact_of_many_ranks"),
    ("ag_gemm gemm_rs", "low_latency", "test_low_latency.py::test_gathers_and_scatters_are_exact"),
    ("gemm_ar", "low_latency", "test_low_latency.py::test_exact"),
    ("gemm_ar", "low_latency", "test_low_latency.py::test_exact_of_many_ranks"),
    ("embedding_a2a", "fused sequential", "test_embedding.py::test_exact"),
    ("a2a_gemm gemm_a2a", "fused sequential", "test_expert_parallel.py::test_exact"),
    ("a2a_gemm gemm_a2a", "fused sequential", "test_expert_parallel.py::test_four_ranks"),
    ("a2a_gemm gemm_a2a", "fused sequential", "test_expert_parallel.py::test_any_number_of_ranks"),
    ("a2a_gemm gemm_a2a", "signalled", "test_signalled_experts.py::test_exact"),
    ("a2a_gemm gemm_a2a", "signalled", "test_signalled_experts.py::test_exact_of_eight_ranks"),
    # on virtual ranks, with emulated Gluon
    ("ag_gemm", "hopper", "protocol/test_hopper_worlds.py::test_ag_gemm"),
    ("gemm_rs", "hopper", "protocol/test_hopper_worlds.py::test_gemm_rs"),
    ("gemm_ar", "hopper", "protocol/test_hopper_worlds.py::test_gemm_ar"),
    ("a2a_gemm gemm_a2a", "hopper", "protocol/test_hopper_worlds.py::test_experts"),
]  # fmt: skip
STRATEGIES = {"low_latency", "hopper", "fused", "pipelined", "signalled", "sequential"}
BASELINES = {"serial", "sequential", "library", "mm + all-reduce", "nccl"}
COLUMN = {"qkv", "fc1", "gate_up", "gate+up"}  # layers whose backward is that of AG+GEMM
NAMED = {"embedding_a2a": "embedding_a2a", "gemv_ar": "gemm_ar"}  # tables of one pattern


def worlds(test: str) -> set[int]:
    """The numbers of ranks that a test runs with: of its parameter `world_size`, or in its calls of
    `on_device`.
    """
    file, name = test.split("::")
    tree = ast.parse((TESTS / file).read_text())
    (function,) = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name]
    found = set()
    for node in ast.walk(function):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called == "pytest.mark.parametrize":
            names = ast.literal_eval(node.args[0])
            if names == "world_size":
                found |= {*ast.literal_eval(node.args[1])}
            elif "world_size" in names:
                place = names.index("world_size")
                given = [ast.literal_eval(one.elts[place]) for one in node.args[1].elts]
                found |= {*given}
        elif called == "on_device" and isinstance(node.args[1], ast.Constant):
            found.add(node.args[1].value)
    return found


def timed() -> Iterator[tuple[str, str, str, str]]:
    """Pattern, strategy, direction and file of the candidates that GPUs have timed, in files with a
    baseline. The benchmarks compare a candidate with the reference before they time it.
    """
    for file in sorted(RESULTS.glob("h200x*/*.jsonl")):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        rows = [one for row in rows for one in _candidates(row)]
        if not any(_candidate(row) in BASELINES for row in rows):
            continue
        for row in rows:
            strategy = _strategy(row)
            pattern = row.get("pattern") or row.get("operation") or NAMED.get(row.get("table", ""))
            if strategy not in STRATEGIES or pattern is None or row.get("failure"):
                continue
            direction = row.get("direction", "forward")
            if pattern.endswith(" backward"):  # of an operation
                pattern, direction = pattern.removesuffix(" backward"), "backward"
            if pattern == "backward":
                layer = row["op"].removesuffix(" dgrad")
                pattern = "ag_gemm" if layer in COLUMN else "gemm_rs"
                direction = "backward"
            yield pattern, strategy, direction, f"{file.parent.name}/{file.stem}"


def _candidates(row: dict) -> list[dict]:
    """A row may have the times of all candidates, by their names."""
    times = row.get("times_us")
    return [{**row, "candidate": name} for name in times] if isinstance(times, dict) else [row]


def _candidate(row: dict) -> str:
    return str(row.get("candidate") or row.get("strategy") or "").split(",")[0]


def _strategy(row: dict) -> str:
    plan = row.get("plan")
    plan = json.loads(plan) if isinstance(plan, str) and plan else plan
    if _candidate(row).endswith(" bands"):  # of experts
        return "signalled"
    return plan["strategy"] if plan else _candidate(row).split(" ")[0]


def evidence() -> dict[str, dict]:
    """By "pattern strategy": `cpu`, ranks of exact tests; `forward`, `backward`, files of rows."""
    found: dict[str, dict[str, set]] = defaultdict(lambda: defaultdict(set))
    for patterns, strategies, test in EXACT:
        for pattern in patterns.split():
            for strategy in strategies.split():
                found[f"{pattern} {strategy}"]["cpu"] |= worlds(test)
    for pattern, strategy, direction, file in timed():
        found[f"{pattern} {strategy}"][direction].add(file)
    return {
        name: {what: sorted(seen) for what, seen in sorted(one.items())}
        for name, one in sorted(found.items())
    }  # fmt: skip


if __name__ == "__main__":
    EVIDENCE.write_text(json.dumps(evidence(), indent=1) + "\n")
