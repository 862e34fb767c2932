"""Checks a candidate's result before any timing: a wrong candidate has no time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron.lab.bench.backward import Backward
from flux_megatron.lab.bench.candidates import Candidate
from flux_megatron.lab.bench.forward import Forward
from flux_megatron.symm import objects, workspaces

Outcome = tuple[str, list[float], list[float]]  # failure, errors, roundings


@dataclass(frozen=True)
class Verdict:
    """`failure` is "" where every rank got through; `errors` and `allowed` have one value a result.

    An error is |result - reference| / |reference| in the Frobenius norm, the largest of all ranks.
    """

    failure: str
    errors: list[float]
    allowed: list[float]

    @property
    def right(self) -> bool:
        within = all(e <= a for e, a in zip(self.errors, self.allowed, strict=True))
        return not self.failure and within


def examine(
    experiment: Forward | Backward, candidates: Sequence[Candidate], group: ProcessGroup
) -> dict[str, Verdict]:
    """Run every candidate that has a call once; the same verdicts on every rank.

    Allowed is twice plain torch's error: that of `gemm` for a local candidate, else that of
    `serial`; or twice the rounding to the result's own dtype, where that is coarser.
    """
    whole, local = experiment.reference()
    called = [one for one in candidates if one.call is not None]
    mine = {one.name: _outcome(experiment, one, local if one.local else whole) for one in called}
    every = objects.all_gather(mine, group)
    worst = {one.name: _worst([of_rank[one.name] for of_rank in every]) for one in called}
    verdicts = {}
    for one in called:
        failure, errors, roundings = worst[one.name]
        _, plain, _ = worst["gemm" if one.local else "serial"]
        allowed = [2 * max(pair) for pair in zip(plain, roundings, strict=False)]
        verdicts[one.name] = Verdict(failure, errors, allowed)
    return verdicts


def _outcome(
    experiment: Forward | Backward, candidate: Candidate, reference: tuple[Tensor, ...]
) -> Outcome:
    assert candidate.call is not None, "asked for candidates with a call only"
    on_gpu = experiment.device.type == "cuda"
    try:
        if isinstance(experiment, Backward):
            experiment.main_grad.zero_()
        for expected in reference if on_gpu else ():
            # NaN where the allocator will put results: no candidate inherits another's
            torch.full(expected.shape, math.nan, device=experiment.device, dtype=torch.bfloat16)
        results = candidate.call()
        if on_gpu:
            torch.cuda.synchronize(experiment.device)
        workspaces.check()
        shapes = [list(t.shape) for t in reference]
        if [list(r.shape) for r in results] != shapes:
            raise ValueError(f"results {[list(r.shape) for r in results]}, {shapes} expected")
    except Exception as error:
        return f"{type(error).__name__}: {error}", [], []
    pairs = [*zip(results, reference, strict=True)]
    roundings = [_distance(expected.to(result.dtype), expected) for result, expected in pairs]
    return "", [_distance(result, expected) for result, expected in pairs], roundings


def _distance(result: Tensor, reference: Tensor) -> float:
    difference = result.detach().to(reference.dtype) - reference
    relative = (difference.norm() / reference.norm()).item()
    return relative if math.isfinite(relative) else math.inf


def _worst(outcomes: Sequence[Outcome]) -> Outcome:
    said, errors, roundings = zip(*outcomes, strict=True)
    if any(said):
        failures = "; ".join(f"rank {r}: {text}" for r, text in enumerate(said) if text)
        return said[0] if len({*said}) == 1 else failures, [], []
    by_result = (zip(*values, strict=True) for values in (errors, roundings))
    largest = [[*map(max, results)] for results in by_result]
    return "", largest[0], largest[1]
