"""The experts of a Mixture-of-Experts layer on one GPU, for one micro-batch.

| arm | forward | backward |
| --- | --- | --- |
| megatron, te | all-to-all, sort, grouped GEMM, and back; the host waits for splits once | the same, without a wait |
| flux | `a2a_gemm`, activation, `gemm_a2a` | the same operations, as duals |

Both permute rows by expert before, and add the top-k results behind. dw is a grouped GEMM. Times of
forward are measured (`expert_cost`); no committed row has backward.
"""  # noqa: E501

from __future__ import annotations

from typing import NamedTuple

from flux_megatron.lab.perf import expert_cost
from flux_megatron.lab.perf.expert_cost import Experts
from flux_megatron.lab.perf.gemm import gemm_us, pass_us
from flux_megatron.lab.perf.hardware import in_training
from flux_megatron.launch.workload import ELEMENT_BYTES, Workload


class Times(NamedTuple):
    name: str
    forward_us: float
    backward_us: float


def times(workload: Workload) -> list[Times]:
    """The router with both permutations, the experts' GEMMs, and what their all-to-all adds."""
    model = workload.model
    fc1 = _experts(workload, model.fc1_width, model.hidden)
    fc2 = _experts(workload, model.hidden, model.ffn)
    strategy = "fused" if workload.arm == "flux" else "nccl"
    first = f"{strategy} + sync" if strategy == "nccl" and workload.moe.host_sync else strategy
    hardware = in_training(workload.cluster)
    gemms = [expert_cost.part_us("gemm", one, hardware) for one in (fc1, fc2)]
    forward = expert_cost.operation_us("a2a_gemm", first, fc1, hardware)
    forward += expert_cost.operation_us("gemm_a2a", strategy, fc2, hardware)
    # dgrad of fc2 sends dy to the experts and multiplies, that of fc1 multiplies and sends back
    backward = expert_cost.operation_us("a2a_gemm", strategy, _dual(fc2), hardware)
    backward += expert_cost.operation_us("gemm_a2a", strategy, _dual(fc1), hardware)
    return [
        _router(workload),
        Times("experts", sum(gemms), 2 * sum(gemms)),  # dgrad and wgrad
        Times("expert all-to-all", forward - sum(gemms), backward - sum(gemms)),
    ]


def _experts(workload: Workload, N: int, K: int) -> Experts:
    moe, ep = workload.moe, workload.parallel.ep
    return Experts(
        ranks=ep,
        experts=moe.experts // ep,
        rows=workload.tokens * moe.topk,
        came=workload.expert_rows,
        N=N,
        K=K,
        moved=workload.model.hidden,
        element_bytes=ELEMENT_BYTES[workload.training.dtype],
    )


def _dual(one: Experts) -> Experts:
    return one._replace(N=one.K, K=one.N)


def _router(workload: Workload) -> Times:
    """The router's GEMM; rows copied for each of their experts, and their results added."""
    moe, hidden, dtype = workload.moe, workload.model.hidden, workload.training.dtype
    hardware = in_training(workload.cluster)
    gemm = gemm_us(hardware, workload.tokens, moe.experts, hidden, dtype)
    permuted = pass_us(hardware, 2 * (1 + moe.topk) * workload.gathered_bytes, kernels=2)
    return Times("router", gemm + permuted, 2 * gemm + permuted)
