"""The operations of expert-parallel layers: their terms, and what each costs on an H200.

| operation | a sum of |
| --- | --- |
| gemm | FLOPs of a grouped GEMM, and bytes of its weights, input and output |
| a2a | bytes that leave or reach a rank, and a call |
| sort | bytes of the rows by (source, expert) put into the order of experts, read and written |
| sync | a wait of the host for the splits |
| a2a_gemm, gemm_a2a | the fused operations: terms of gemm, and of a2a |

`nccl` is a2a + sort + gemm, for splits that the host knows; `nccl + sync` fetches them first.
"""

from __future__ import annotations

from typing import NamedTuple

from flux_megatron.lab.perf.hardware import H200, Hardware

# us of one unit of each term on 2 x H200: fitted to docs/results/h200x2/expert_parallel.jsonl.
# FLOPs are in 1e9, bytes in kB.
COSTS: dict[str, dict[str, float]] = {
    "gemm": {"gflop": 1.2296, "gemm_bytes": 0.00018622},
    "a2a": {"remote_bytes": 0.0029546, "call": 41.726},
    "sort": {"sorted_bytes": 0.00027156},
    "sync": {"call": 821.13},
    "a2a_gemm": {"gflop": 1.298, "gemm_bytes": 0.00032547, "remote_bytes": 0.0},
    "gemm_a2a": {"gflop": 1.1477, "gemm_bytes": 0.00045658, "remote_bytes": 0.00031454},
}


class Experts(NamedTuple):
    """One operation on the busiest of `ranks` ranks, which has `experts` of them: `rows` leave each
    rank, `came` reach this one; w is [N, K] for each expert. `moved` is the width of the rows that
    travel: K of a2a_gemm, N of gemm_a2a.
    """

    ranks: int
    experts: int
    rows: float
    came: float
    N: int
    K: int
    moved: int
    element_bytes: int = 2

    @property
    def terms(self) -> dict[str, float]:
        weights = self.experts * self.N * self.K
        away = (self.ranks - 1) / self.ranks
        # the busiest rank receives most; what is sent is the same for all but its own share
        remote = max(self.came * away, self.rows - self.came / self.ranks)
        kb = self.element_bytes * 1e-3
        return {
            "gflop": 2 * self.came * self.N * self.K * 1e-9,
            "gemm_bytes": (weights + self.came * (self.N + self.K)) * kb,
            "remote_bytes": remote * self.moved * kb,
            "sorted_bytes": 2 * self.came * self.moved * kb,
            "call": 1.0,
        }


def part_us(part: str, experts: Experts, hardware: Hardware = H200) -> float:
    """One part; on another GPU by its rates over the H200's."""
    terms = experts.terms
    return sum(us * (terms[name] / _rate(name, hardware)) for name, us in COSTS[part].items())


def operation_us(
    operation: str, strategy: str, experts: Experts, hardware: Hardware = H200
) -> float:
    """`a2a_gemm` or `gemm_a2a`, by "fused", "nccl" or "nccl + sync".

    A fused one is not shorter than the all-to-all alone.
    """
    if experts.ranks == 1:
        return part_us("gemm", experts, hardware)
    parts = {part: part_us(part, experts, hardware) for part in COSTS}
    if strategy == "fused":
        return max(parts[operation], parts["a2a"])
    unfused = parts["gemm"] + parts["a2a"] + parts["sort"]
    return unfused + (parts["sync"] if strategy == "nccl + sync" else 0.0)


def _rate(term: str, hardware: Hardware) -> float:
    """Of this GPU over the H200's."""
    if term == "gflop":
        return hardware.tflops["bfloat16"] / H200.tflops["bfloat16"]
    if term in ("gemm_bytes", "sorted_bytes"):
        return hardware.memory_gbps / H200.memory_gbps
    if term == "remote_bytes":
        return hardware.nccl_gbps / H200.nccl_gbps
    return 1.0
