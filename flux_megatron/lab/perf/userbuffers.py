"""What a layer with TransformerEngine's userbuffers takes in a step beside its linear operations.

Rows of single operations do not show it: measured steps with `--tp-comm-overlap` are up to 9 ms
longer than those rows make them, and at TP 2 and in small steps longer than stock's. Two terms fit
the difference: a time for every layer, and passes over the MLP's tensors in models with biases.
`COSTS` is fitted to docs/results/h200x2/iterations.jsonl and h200x4/iterations.jsonl
(TransformerEngine 2.11); tests/perf/test_userbuffers.py compares.
"""

from __future__ import annotations

from collections.abc import Mapping

from flux_megatron.lab.perf.hardware import H200, in_training
from flux_megatron.lab.perf.terms import total
from flux_megatron.launch.workload import ELEMENT_BYTES, Workload

NAME = "userbuffers"
COSTS: Mapping[str, float] = {"layer": 306.44, "biased GB": 5378.1}  # us of each on an H200


def terms(workload: Workload) -> dict[str, float]:
    """Of one layer and micro-batch: itself, and with biases the GB of an [M, ffn / tp] tensor."""
    elements = workload.tokens * workload.model.ffn // workload.parallel.tp
    size_gb = elements * ELEMENT_BYTES[workload.training.dtype] * 1e-9
    return {"layer": 1.0, "biased GB": size_gb if workload.model.linear_bias else 0.0}


def added_us(workload: Workload) -> float:
    """Of one layer and micro-batch, forward and backward, which the rows do not tell apart. The
    passes are as fast as the GPU's memory.
    """
    costs = dict(COSTS)
    costs["biased GB"] *= H200.memory_gbps / in_training(workload.cluster).memory_gbps
    return total(costs, terms(workload))
