"""One library GEMM behind a gather by copy engines: its prediction beside measured rows."""

from __future__ import annotations

import json
from pathlib import Path

from flux_megatron.lab.perf.hardware import H100
from flux_megatron.lab.perf.operator_cost import gemms_us, predict_us
from flux_megatron.problem import Pattern, Plan, Problem

ROWS = Path(__file__).parents[2] / "docs/results/h100x2"
ONE_GEMM = Plan("pipelined", splits=1)


def test_it_takes_as_long_beyond_the_gemm_as_predicted():
    raced: dict[tuple[str, str], dict[str, float]] = {}
    for file in ("held_out.jsonl", "k_parts.jsonl"):
        for row in map(json.loads, (ROWS / file).read_text().splitlines()):
            if row["case"].startswith("ag_gemm") and not row["beside"]:
                plan = row["plan"].replace('"split_k_shards": 0, ', "")  # which plans had
                raced.setdefault((row["case"], row["run"]), {})[plan] = row["median_us"]
    shapes = set()
    for (case, _), us in raced.items():
        M, N, K = map(int, case.split()[1].split("x"))
        problem = Problem.of_operands(Pattern.AG_GEMM, M // 2, N, K, "bfloat16", 2, "nt", "cuda")
        if ONE_GEMM.dumps() not in us:
            continue
        predicted = predict_us(problem, ONE_GEMM, H100) - gemms_us(problem, H100)[0]
        assert abs(us[ONE_GEMM.dumps()] - us["gemm"] - predicted) < 4, case
        shapes.add(case)
    assert len(shapes) == 12
