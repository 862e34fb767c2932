"""How far this model's steps lie from measured or published ones, by GPU and link.

The numbers are of committed rows and of `published_runs`; tests/perf/test_accuracy.py compares.
"""

from __future__ import annotations

from dataclasses import dataclass

from flux_megatron.lab.perf import hardware
from flux_megatron.launch.workload import Workload


@dataclass(frozen=True)
class Accuracy:
    """`step`: least and largest predicted / measured - 1 of steps, `speedup`: the same of our
    speedup over Megatron. `of` names the runs. None: nothing is measured or published.
    """

    step: tuple[float, float] | None
    speedup: tuple[float, float] | None
    of: str


KNOWN = {  # in 16 bits, by GPU and link
    ("H200", "nvlink"): Accuracy(
        (-0.1, 0.02), (-0.05, 0.02), "45 iterations of three models on 2 x H200, TP 2"
    ),
    ("H200", "host"): Accuracy(
        (0.06, 0.06), (0.0, 0.0), "2 iterations of Llama-2 70B on 2 x H200, TP 2, with 25 GB/s"
    ),
    ("H200", "cards"): Accuracy(
        (-0.06, 0.03),
        (0.04, 0.06),
        "6 iterations of three models on 2 x H200 that NCCL joins over host memory, TP 2",
    ),
    ("A100", "nvlink"): Accuracy(
        (-0.08, 0.05), None, "eight published runs of Megatron-LM on A100, TP 8"
    ),
}

KNOWN_IN_FP8 = {
    ("H100", "nvlink"): Accuracy(
        (-0.04, 0.05), (0.0, 0.05), "8 iterations of two models in FP8 on 2 and 4 x H100"
    ),
}


def of(workload: Workload) -> Accuracy:
    """What is known of predictions for this GPU and link, in FP8 or in 16 bits. `BadInput` as
    `hardware.of`.
    """
    cluster, in_fp8 = workload.cluster, workload.training.fp8 != "none"
    between_nodes = workload.parallel.tp > cluster.gpus_per_node
    name, link = hardware.of(cluster).name, "cards" if between_nodes else cluster.link.kind
    what = f"{name} in FP8" if in_fp8 else name
    unknown = Accuracy(None, None, f"no step is measured or published for {what} on {link}")
    return (KNOWN_IN_FP8 if in_fp8 else KNOWN).get((name, link), unknown)


def sentence(workload: Workload) -> str:
    found = of(workload)
    if found.step is None:
        return f"Error of the model here: unknown; {found.of}."
    text = f"Error of the model here: steps {_range(found.step)}"
    if found.speedup is not None:
        text += f", our speedup {_range(found.speedup)}"
    return f"{text} ({found.of})."


def _range(errors: tuple[float, float]) -> str:
    return f"{errors[0]:+.0%} to {errors[1]:+.0%}"
