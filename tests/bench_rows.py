"""Rows written by hand for the tests of what reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from flux_megatron.bench import targets
from flux_megatron.bench.efficiency import baselines
from flux_megatron.bench.records import COMPETITOR, LIBRARY, OURS, Provenance, Row
from flux_megatron.bench.suites import Case

H200 = Provenance(
    run="first",
    date="2026-11-20T10:00:00+00:00",
    commit="0123456789ab",
    gpu="NVIDIA H200",
    driver="580.1",
    cuda="13.0",
    torch="2.11.0",
    triton="3.6.0",
    nccl="2.28.9",
    nvls="off",
    max_connections="unset",
    world_size=4,
    dtype="bfloat16",
    scale=1,
    clock_mhz=1700,
    power_w=650.0,
    power_limit_w=700.0,
)


def rows_of(
    case: Case, medians_us: Mapping[str, float], provenance: Provenance = H200, rounds: int = 12
) -> list[Row]:
    """One row a candidate; all right, host time of `auto` 20 us."""
    against = baselines(medians_us)
    return [
        row_of(
            case,
            name,
            provenance,
            times_us=[median] * rounds,
            median_us=median,
            min_us=median,
            p20_us=median,
            p80_us=median,
            gemm_us=against.gemm if against else None,
            serial_us=against.serial if against else None,
            efficiency=against.efficiency(median) if against else None,
            host_us=20.0 if name == "auto" else None,
            plan={"strategy": "fused"} if name == "auto" else None,
        )
        for name, median in medians_us.items()
    ]


def row_of(case: Case, name: str, provenance: Provenance = H200, **values: Any) -> Row:
    """A row without times unless they are given."""
    role = OURS if name in ("auto", "ours_gemm") else LIBRARY
    if name in targets.COMPETITORS[case.pattern]:
        role = COMPETITOR
    nothing = dict.fromkeys(field.name for field in fields(Row))
    empty: dict[str, list[float]] = {"errors": [], "allowed": [], "times_us": []}
    given = {
        **nothing,
        **empty,
        "status": "ok",
        "beside": False,
        "reason": "",
        "suite": case.suite,
        "pattern": case.pattern,
        "op": case.op,
        "layout": case.layout,
        "M": case.M,
        "N_local": case.N_local,
        "K_local": case.K_local,
        "candidate": name,
        "role": role,
        "provenance": provenance,
    }
    return Row(**given | values)
