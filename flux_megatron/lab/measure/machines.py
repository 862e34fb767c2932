"""Calls of ranks that are no machine of each other: what do bands of `signalled` gain there?

    torchrun --nproc-per-node=2 -m flux_megatron.lab.measure.machines out.jsonl
    torchrun --nproc-per-node=2 -m flux_megatron.lab.measure.machines out.jsonl --link sockets
    torchrun --nproc-per-node=2 -m flux_megatron.lab.measure.machines out.jsonl --link mailboxes
    torchrun --nproc-per-node=2 -m flux_megatron.lab.measure.machines out.jsonl --beside
    torchrun --nproc-per-node=2 -m flux_megatron.lab.measure.machines out.jsonl --device cpu

Each rank says that it is a machine of its own, so nothing but NCCL joins them, through the memory
of the machine or by sockets (`gpu_run.be_apart`). With `--link mailboxes` they are one machine
whose GPUs reach none of each other, and strategies by copy engines run too. A row is a plan that
races try, verified beside `sequential`, with the library's GEMM, the collective, and one after the
other. `of_ideal` is the longer of GEMM and collective by the plan's time. With `--beside` all of
them run beside all-reduces of another communicator, which share the link. `host_us` is what the
host needs to enqueue a call.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import typer

from flux_megatron.lab.bench.candidates import host_time_us
from flux_megatron.lab.measure import gpu_run
from flux_megatron.lab.measure.gpu_run import Calls, Run
from flux_megatron.overlap import band_shares, registry, signalled
from flux_megatron.patterns import Pattern
from flux_megatron.problem import Plan, Problem
from flux_megatron.symm.workspaces import workspace
from flux_megatron.tune_command.measure import label
from flux_megatron.tuning.timing import race
from flux_megatron.tuning.trial import Trial

# of a rank: M x N x K, N_local of a gather, K_local of a reduction
CASES = (
    "ag_gemm:8192x28672x8192,ag_gemm:8192x14336x8192,ag_gemm:16384x8192x8192,"
    "gemm_rs:8192x8192x28672,gemm_rs:8192x8192x14336,gemm_rs:16384x8192x8192,"
    "gemm_ar:8192x8192x14336,gemm_ar:4096x8192x28672"
)
SMALL = "ag_gemm:64x32x32,gemm_rs:64x32x32,gemm_ar:64x32x32"


def measure(run: Run, case: str, link: str, rounds: int, beside: bool) -> bool:
    name, _, sizes = case.partition(":")
    pattern, (M, N, K) = Pattern(name), map(int, sizes.split("x"))
    R = run.group.size()
    problem = Problem.of_operands(
        pattern, M // R if pattern.spec.gathers else M, N, K, run.about.dtype, R, "nt",
        run.device.type,
    )  # fmt: skip
    trial = Trial(problem, run.group, run.device)
    trial.renew()
    trial.learn()
    plans = {_name_of(problem, plan): plan for plan in signalled.candidates(problem)}
    missing = workspace(run.group, run.device).missing
    if missing is not None and missing.mailboxes:
        able = (registry.candidates(problem, name, missing) for name in ("hopper", "pipelined"))
        plans |= {label(plan): plan for of_one in able for plan in of_one}
    failures = {name: run.failure(trial.verified(plan)) for name, plan in plans.items()}
    for name in filter(failures.get, failures):
        run.say(f"{case}, {name} WRONG: {failures[name]}")
    right = {name: plan for name, plan in plans.items() if not failures[name]}
    ours = {name: trial.call(plan) for name, plan in right.items()}
    calls: Calls = {**plain_calls(run, trial), **ours}
    result = race(calls, group=run.group, device=run.device, rounds=rounds, beside=beside)
    us = {name: round(result.median_us(name), 1) for name in result.times_us}
    host = {
        name: round(host_time_us(calls[name], run.device, n=5))  # more fill the device's queue
        for name in ("sequential", *right)
    }
    gemm, collective, serial = us["gemm"], us["collective"], us["sequential"]
    run.say(f"{case}: GEMM {gemm}, collective {collective}, one after the other {serial}")
    for name, plan in right.items():
        speed, of_ideal = serial / us[name], max(gemm, collective) / us[name]
        run.row(
            "machines", case=case, link=link, candidate=name, us=us[name], gemm_us=gemm,
            collective_us=collective, serial_us=serial, speed=round(speed, 3),
            of_ideal=round(of_ideal, 3), plan=plan.dumps(), host_us=host[name],
            serial_host_us=host["sequential"],
        )  # fmt: skip
        run.say(f"  {name:32} {us[name]:8.1f} us, speed {speed:.2f}, of the ideal {of_ideal:.2f}, "
                f"host {host[name]} us")  # fmt: skip
    trial.close()
    return not any(failures.values())


def plain_calls(run: Run, trial: Trial) -> Calls:
    """The library's GEMM of all rows, the collective alone, and one after the other."""
    p, group = trial.problem, run.group
    x, w = trial.random(p.M, p.K_local), trial.random(p.N_local, p.K_local)
    y = x.new_empty(p.M, p.N_local)

    def collective() -> None:
        if p.spec.gathers:
            dist.all_gather_into_tensor(x, x[: p.M_shard], group=group)
        elif p.spec.scatters:
            dist.reduce_scatter_tensor(y[: p.M_shard], y, group=group)
        else:
            dist.all_reduce(y, group=group)

    return {
        "gemm": lambda: torch.mm(x, w.t(), out=y), "collective": collective,
        "sequential": trial.call(Plan("sequential")),
    }  # fmt: skip


def _name_of(problem: Problem, plan: Plan) -> str:
    """Tiles of each band, and SMs of the collectives."""
    rows = plan.group_rows
    last = band_shares.rows_of(problem) - sum(rows)
    tiles = [size // plan.tile.block_m for size in (*rows, last)]
    return f"{' '.join(map(str, tiles))}, {plan.comm_sms} SMs"


def main(
    out: Path, commit: str = "", device: str = "cuda", cases: str = "",
    rounds: int = 8, link: str = "memory", seconds: float = 240, beside: bool = False,
) -> None:  # fmt: skip
    """Be one of the ranks."""
    named = gpu_run.be_apart(link)
    run = gpu_run.start_on(device, out, commit, seconds, beside)
    given = cases or (SMALL if device == "cpu" else CASES)
    shared = named + ", beside all-reduces" * beside
    gpu_run.measure_each(
        run, given.split(","), lambda case: measure(run, case, shared, rounds, beside)
    )


if __name__ == "__main__":
    typer.run(main)
