"""Checks a candidate's result before any timing: a wrong candidate has no time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron.lab.bench.backward import Backward
from flux_megatron.lab.bench.candidates import Candidate
from flux_megatron.lab.bench.forward import Forward
from flux_megatron.symm import workspace


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
    reference, local_reference = experiment.reference()
    outcomes = {
        candidate.name: _errors(
            experiment, candidate, local_reference if candidate.local else reference
        )
        for candidate in candidates
        if candidate.call is not None
    }
    everybody: list[dict[str, _Outcome]] = [{}] * group.size()
    dist.all_gather_object(everybody, outcomes, group=group)
    plain = {}
    for candidate in candidates:
        if candidate.call is not None and candidate.name in ("gemm", "serial"):
            plain[candidate.local] = _merge(everybody, candidate.name)
    verdicts = {}
    for candidate in candidates:
        if candidate.call is not None:
            outcome = _merge(everybody, candidate.name)
            baseline = plain[candidate.local].errors
            allowed = [2 * max(pair) for pair in zip(baseline, outcome.rounding, strict=False)]
            verdicts[candidate.name] = Verdict(outcome.failure, outcome.errors, allowed)
    return verdicts


@dataclass(frozen=True)
class _Outcome:
    failure: str
    errors: list[float]
    rounding: list[float]


def _errors(
    experiment: Forward | Backward, candidate: Candidate, reference: tuple[Tensor, ...]
) -> _Outcome:
    """What one call on this rank gives."""
    assert candidate.call is not None, "asked for candidates with a call only"
    try:
        if isinstance(experiment, Backward):
            experiment.main_grad.zero_()
        _poison(reference, experiment.device)
        results = candidate.call()
        if experiment.device.type == "cuda":
            torch.cuda.synchronize(experiment.device)
        workspace.check()
        shapes = [list(t.shape) for t in reference]
        if [list(r.shape) for r in results] != shapes:
            raise ValueError(f"results {[list(r.shape) for r in results]}, {shapes} expected")
    except Exception as error:
        return _Outcome(f"{type(error).__name__}: {error}", [], [])
    pairs = [*zip(results, reference, strict=True)]
    rounding = [_distance(expected.to(result.dtype), expected) for result, expected in pairs]
    return _Outcome("", [_distance(result, expected) for result, expected in pairs], rounding)


def _poison(reference: tuple[Tensor, ...], device: torch.device) -> None:
    """Leave NaN where the allocator will put results: no candidate inherits another's."""
    if device.type == "cuda":
        for expected in reference:
            torch.full(expected.shape, math.nan, device=device, dtype=torch.bfloat16)


def _distance(result: Tensor, reference: Tensor) -> float:
    difference = result.detach().to(reference.dtype) - reference
    relative = (difference.norm() / reference.norm()).item()
    return relative if math.isfinite(relative) else math.inf


def _merge(everybody: Sequence[dict[str, _Outcome]], name: str) -> _Outcome:
    """The worst over the ranks."""
    outcomes = [of_rank[name] for of_rank in everybody]
    failures = [f"rank {r}: {o.failure}" for r, o in enumerate(outcomes) if o.failure]
    if failures:
        same = len({o.failure for o in outcomes}) == 1
        return _Outcome(outcomes[0].failure if same else "; ".join(failures), [], [])
    return _Outcome(
        "",
        [max(values) for values in zip(*(o.errors for o in outcomes), strict=True)],
        [max(values) for values in zip(*(o.rounding for o in outcomes), strict=True)],
    )
