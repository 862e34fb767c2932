"""`a2a_gemm` and `gemm_a2a` beside NCCL's all-to-all, a sort by expert and a grouped GEMM.

First every strategy is compared with the reference, forward and backward: small integers, exact,
new counts in every call; those that ask no host also in a replayed graph. Then all candidates of an
operation are timed in turns.

| candidate | what it is |
| --- | --- |
| hopper, fused, signalled, sequential | our strategies by their default plans, where they can run |
| nccl | the library with splits that are known |
| nccl + sync | it fetches the splits too, as forward of a training step must |
| gemm, a2a, wgrad | its parts |
| own gemm, own wgrad | ours, with all rows at home |

Backward gives dx and dw. Counts are those of a uniform router, and of one whose first expert gets a
third of all rows.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

import torch

from flux_megatron.lab.bench.operations import expert_verification
from flux_megatron.lab.bench.operations.expert_work import CASES, SMALL, Case, Work, plans
from flux_megatron.lab.bench.table_run import Run
from flux_megatron.symm.workspace import release
from flux_megatron.tuning.timing import race

# N, K, experts of a rank, rows and calls of what is verified
CHECKED = {
    "cpu": ((24, 16, 3, 20, 3),),
    "cuda": ((1088, 512, 4, 700, 12), (576, 512, 32, 1500, 12)),
}  # fmt: skip


def cases(run: Run) -> tuple[Case, ...]:
    return SMALL if run.device.type == "cpu" else CASES


def verify(run: Run) -> str:
    """What is wrong, or "", the same on all ranks. Collective."""
    dtype = getattr(torch, run.about.dtype)
    for shape in CHECKED[run.device.type]:
        N, K, experts, *_ = shape
        x = torch.empty(1, K, device=run.device, dtype=dtype)
        for name, plan in plans(run, x, N).items():
            title = f"{name}, {experts} experts of {N} x {K}"
            if said := run.failure(partial(expert_verification.verify, run, *shape, plan)):
                return f"{title}: {said[:4000]}"
            run.say(f"{title}: exact")
    return ""


def measure(run: Run, case: Case, rounds: int) -> None:
    """Rows of both operations, forward and backward."""
    work = Work(case, run)
    for operation, calls in work.candidates():
        if not run.time_left():
            run.say("no time for the others")
            break
        found = race(calls, group=run.group, device=run.device, rounds=rounds)
        run.row(
            "expert_parallel", operation=operation, **asdict(case),
            plans={name: plan.dumps() for name, plan in work.plans.items()},
            times_us=found.times_us, failures=found.failures,
        )  # fmt: skip
        ms = {name: found.median_us(name) / 1e3 for name in found.times_us}
        cells = ", ".join(f"{name} {value:.3f}" for name, value in ms.items())
        first, none = next(iter(work.plans)), float("nan")
        speedup = ms.get("nccl", none) / ms.get(first, none)
        run.say(f"{case}, {operation}, ms: {cells}; {first} x{speedup:.2f} of nccl")
        for name, why in found.failures.items():
            run.say(f"  {name} failed: {why[:300]}")
        del calls
    del work
    release()  # symmetric memory of the next size
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
