"""How far this model's steps lie from measured or published ones, by GPU and link.

The numbers are of committed rows and of `published_runs`; tests/perf/test_accuracy.py compares.
"""

from __future__ import annotations

from dataclasses import dataclass

from flux_megatron.lab.perf import hardware
from flux_megatron.launch.workload import Cluster


@dataclass(frozen=True)
class Accuracy:
    """`step`: least and largest predicted / measured - 1 of steps, `speedup`: the same of our
    speedup over Megatron. `of` names the runs. None: nothing is measured or published.
    """

    step: tuple[float, float] | None
    speedup: tuple[float, float] | None
    of: str


KNOWN = {
    ("H200", "nvlink"): Accuracy(
        (-0.09, -0.01), (-0.02, 0.02), "39 iterations of two models on 2 x H200, TP 2"
    ),
    ("A100", "nvlink"): Accuracy(
        (-0.08, 0.05), None, "eight published runs of Megatron-LM on A100, TP 8"
    ),
}


def of(cluster: Cluster) -> Accuracy:
    """What is known of predictions for this GPU and link. `ValueError` as `hardware.of`."""
    name, link = hardware.of(cluster).name, cluster.link.kind
    unknown = Accuracy(None, None, f"no step is measured or published for {name} on {link}")
    return KNOWN.get((name, link), unknown)


def sentence(cluster: Cluster) -> str:
    """For the reader of a prediction."""
    found = of(cluster)
    if found.step is None:
        return f"Error of the model here: unknown; {found.of}."
    text = f"Error of the model here: steps {_range(found.step)}"
    if found.speedup is not None:
        text += f", our speedup {_range(found.speedup)}"
    return f"{text} ({found.of})."


def _range(errors: tuple[float, float]) -> str:
    return f"{errors[0]:+.0%} to {errors[1]:+.0%}"
