"""The experts of a Mixture-of-Experts layer on one GPU, for one micro-batch.

| arm | forward | backward |
| --- | --- | --- |
| megatron, te | all-to-all, sort, grouped GEMM, and back; the host waits for splits once | the same, without a wait |
| flux | `a2a_gemm`, activation, `gemm_a2a` | the same operations, as duals |

Both permute rows by expert before, and add the top-k results behind. dw is a grouped GEMM. Times of
forward are measured; no committed row has backward.
"""  # noqa: E501

from __future__ import annotations

from typing import NamedTuple

from flux_megatron.lab.perf.gemm import gemm_us, pass_us
from flux_megatron.lab.perf.hardware import H200, Hardware, in_training
from flux_megatron.launch.workload import ELEMENT_BYTES, Workload

# Of each part of an operation, and of the fused ones, us of one unit of a term on 2 x H200: fitted
# to rows of commit f93af2e (`git show ee8732d:docs/results/h200x2/expert_parallel.jsonl`). FLOPs
# are in 1e9, bytes in kB: those that a grouped GEMM reads and writes, that leave or reach a rank,
# and of rows put into the order of experts, read and written. `sync` is a wait of the host for the
# splits.
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

    def terms(self, hardware: Hardware) -> dict[str, float]:
        """Over this GPU's rates, in units of the H200's."""
        weights = self.experts * self.N * self.K
        away = (self.ranks - 1) / self.ranks
        # the busiest rank receives most; what is sent is the same for all but its own share
        remote = max(self.came * away, self.rows - self.came / self.ranks)
        kb = self.element_bytes * 1e-3
        memory = kb * H200.memory_gbps / hardware.memory_gbps
        compute = H200.tflops["bfloat16"] / hardware.tflops["bfloat16"]
        return {
            "gflop": 2 * self.came * self.N * self.K * 1e-9 * compute,
            "gemm_bytes": (weights + self.came * (self.N + self.K)) * memory,
            "remote_bytes": remote * self.moved * kb * H200.nccl_gbps / hardware.nccl_gbps,
            "sorted_bytes": 2 * self.came * self.moved * memory,
            "call": 1.0,
        }


def part_us(part: str, experts: Experts, hardware: Hardware = H200) -> float:
    terms = experts.terms(hardware)
    return sum(us * terms[name] for name, us in COSTS[part].items())


def _operation_us(operation: str, strategy: str, experts: Experts, hardware: Hardware) -> float:
    """`a2a_gemm` or `gemm_a2a`, by "fused", "nccl" or "nccl + sync". A fused one is not shorter
    than the all-to-all alone.
    """
    if experts.ranks == 1:
        return part_us("gemm", experts, hardware)
    parts = {part: part_us(part, experts, hardware) for part in COSTS}
    if strategy == "fused":
        return max(parts[operation], parts["a2a"])
    unfused = parts["gemm"] + parts["a2a"] + parts["sort"]
    return unfused + (parts["sync"] if strategy == "nccl + sync" else 0.0)


def times(workload: Workload) -> list[tuple[str, float, float]]:
    """Forward and backward of the router with both permutations, of the experts' GEMMs, and what
    their all-to-all adds.
    """
    model = workload.model
    fc1 = _experts(workload, model.fc1_width, model.hidden)
    fc2 = _experts(workload, model.hidden, model.ffn)
    strategy = "fused" if workload.arm == "flux" else "nccl"
    first = f"{strategy} + sync" if strategy == "nccl" and workload.moe.host_sync else strategy
    hardware = in_training(workload.cluster)
    gemms = sum(part_us("gemm", one, hardware) for one in (fc1, fc2))
    forward = _operation_us("a2a_gemm", first, fc1, hardware)
    forward += _operation_us("gemm_a2a", strategy, fc2, hardware)
    # dgrad of fc2 sends dy to the experts and multiplies, that of fc1 multiplies and sends back
    backward = _operation_us("a2a_gemm", strategy, _dual(fc2), hardware)
    backward += _operation_us("gemm_a2a", strategy, _dual(fc1), hardware)
    return [
        ("router", *_router_us(workload, hardware)),
        ("experts", gemms, 2 * gemms),  # dgrad and wgrad
        ("expert all-to-all", forward - gemms, backward - gemms),
    ]


def _experts(workload: Workload, N: int, K: int) -> Experts:
    moe, ep = workload.moe, workload.parallel.ep
    rows, element = workload.tokens * moe.topk, ELEMENT_BYTES[workload.training.dtype]
    each, moved = moe.experts // ep, workload.model.hidden
    return Experts(ep, each, rows, workload.expert_rows, N, K, moved, element)


def _dual(one: Experts) -> Experts:
    return one._replace(N=one.K, K=one.N)


def _router_us(workload: Workload, hardware: Hardware) -> tuple[float, float]:
    """The router's GEMM; rows copied for each of their experts, and their results added."""
    moe, hidden, dtype = workload.moe, workload.model.hidden, workload.training.dtype
    gemm = gemm_us(hardware, workload.tokens, moe.experts, hidden, dtype)
    permuted = pass_us(hardware, 2 * (1 + moe.topk) * workload.gathered_bytes, kernels=2)
    return gemm + permuted, 2 * gemm + permuted
