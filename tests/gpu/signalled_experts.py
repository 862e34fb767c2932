"""`signalled` experts on GPUs: verified, then timed beside NCCL one after the other, and `fused`.

    torchrun --standalone --nproc-per-node 2 tests/gpu/signalled_experts.py --out rows.jsonl
    NCCL_P2P_DISABLE=1 torchrun ... tests/gpu/signalled_experts.py --out rows.jsonl
    TRITON_INTERPRET=1 torchrun ... tests/gpu/signalled_experts.py --device cpu  # rehearsal

The second line keeps NCCL from the peers' memory, as between cards without peer access; `fused`
has it still, and is shown for comparison.

Verified: small integers, forward and backward, exact, new counts in every call. Timed, in one race
a problem and operation: `signalled` by bands and SMs left to NCCL; `sequential`, which ran where
`signalled` runs now; `nccl`, all-to-all with splits that are known, a sort and torch's grouped
GEMM; `nccl + sync`, which fetches the splits too, as a training step must; `fused`; the parts
`gemm` and `a2a`, and `a2a` on communicators of so many SMs. Prints ms; rows have all rounds.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import gpu_run
import torch
from gpu_run import Run
from torch import Tensor

import flux_megatron
from flux_megatron.bench.operations.expert_baseline import Baseline, grouped
from flux_megatron.bench.operations.expert_verification import Verification, routed
from flux_megatron.expert_parallel import fused, ops, signalled
from flux_megatron.overlap.signalled import communicator
from flux_megatron.problem import Plan
from flux_megatron.symm.workspace import workspace
from flux_megatron.tuning.timing import race

LIMIT_S = 95
BANDS_AND_SMS = ((4, 8), (4, 16), (2, 8), (8, 8), (1, 0))


class Model(NamedTuple):
    """An expert's GEMMs: hidden to ffn, and back. `rows` of a rank."""

    name: str
    hidden: int
    ffn: int
    experts: int
    rows: int


MODELS = {
    "cpu": (Model("tiny", 32, 48, 4, 40),),
    "cuda": (
        Model("mixtral", 4096, 14336, 8, 8192),
        Model("fine 2048", 2048, 2048, 64, 32768),
        Model("fine 7168", 7168, 2048, 64, 32768),
    ),
}
# N, K, experts of a rank, rows
VERIFIED = {
    "cpu": ((24, 16, 3, 40),), "cuda": ((1040, 512, 4, 700), (528, 512, 32, 1500))
}  # fmt: skip


def plan_of(x: Tensor, N: int, bands: int, comm_sms: int) -> Plan:
    tile = fused.default_plan(x, N).tile
    return Plan("signalled", tile=tile, splits=bands, comm_sms=comm_sms)


def verify(run: Run, shape: tuple[int, int, int, int], bands: int, comm_sms: int) -> None:
    """`AssertionError` unless calls with counts of their own are exact, forward and backward."""
    given = Verification(run, *shape)
    given.plan = plan_of(given.x.detach(), shape[0], bands, comm_sms)
    for call in range(4):
        given.fill(call)
        made = given.step()
        flux_megatron.synchronize()
        for name, right in given.expected().items():
            wrong = int((made[name] != right.to(made[name].dtype)).sum())
            where = f"{name} are wrong on rank {run.group.rank()}"
            assert not wrong, f"{bands} bands, call {call}: {wrong} elements of {where}"


class Timed:
    """One problem: x [rows, hidden] to w, and z [capacity, ffn] back through v."""

    def __init__(self, run: Run, model: Model, skew: float) -> None:
        self.run, self.model = run, model
        ranks, rank = run.group.size(), run.group.rank()
        experts = model.experts // ranks
        self.counts = routed(model.rows, ranks, experts, skew, rank).to(run.device)
        self.known = Baseline(run, self.counts, False)
        self.fetched = Baseline(run, self.counts, True)
        self.came = sum(self.known.received)
        self.capacity = max(model.rows, int(self.known.every.sum((0, 2)).max()))
        self.w = self._random(experts, model.ffn, model.hidden)
        self.v = self._random(experts, model.hidden, model.ffn)
        self.x = self._random(model.rows, model.hidden)
        self.z = self._random(self.capacity, model.ffn)
        self.arrived = self._random(self.came, model.hidden)

    def _random(self, *shape: int) -> Tensor:
        dtype = getattr(torch, self.run.about.dtype)
        return torch.randn(*shape, device=self.run.device, dtype=dtype) / 8

    def there(self, plan: Plan) -> Tensor:
        group = self.run.group
        return ops.a2a_gemm(
            self.x, self.w, self.counts, group, capacity=self.capacity, plan=plan
        )[0]  # fmt: skip

    def back(self, plan: Plan) -> Tensor:
        return ops.gemm_a2a(
            self.z, self.v, self.counts, self.run.group, tokens=len(self.x), plan=plan
        )  # fmt: skip

    def candidates(self, operation: str) -> dict[str, Callable]:
        there, known, fetched = operation == "a2a_gemm", self.known, self.fetched
        ours, a, b = (self.there, self.x, self.w) if there else (self.back, self.z, self.v)
        N = b.shape[1]
        sent, received = known.sent, known.received
        if not there:
            sent, received = received, sent
        rows = self.x if there else self.arrived
        held = self.arrived if there else self.z[: self.came]
        plans = {
            f"{bands} bands, {sms} SMs": plan_of(a, N, bands, sms) for bands, sms in BANDS_AND_SMS
        } | {"sequential": Plan("sequential"), "fused": fused.default_plan(a, N)}
        return {name: partial(ours, plan) for name, plan in plans.items()} | {
            "nccl": lambda: getattr(known, operation)(a, b),
            "nccl + sync": lambda: getattr(fetched, operation)(a, b),
            "gemm": lambda: grouped(held, b, known.ends),
            "a2a": lambda: known.exchange(rows, sent, received),
            "a2a, 8 SMs": lambda: self._in_pieces(rows, sent, received),
        }

    def _in_pieces(self, rows: Tensor, sent: list[int], received: list[int]) -> None:
        """What the bands do, as one band, on a communicator of 8 CTAs."""
        group = communicator(workspace(self.run.group, rows.device), 8)
        arrived = rows.new_empty(sum(received), rows.shape[1])
        pieces = [list(one.split(sizes)) for one, sizes in ((arrived, received), (rows, sent))]
        for one in pieces:
            own = self.run.group.rank()
            one[own] = one[own][:0]
        signalled.exchange(group, *pieces)


def measure(run: Run, model: Model, skew: float, rounds: int) -> None:
    timed = Timed(run, model, skew)
    for operation in ("a2a_gemm", "gemm_a2a"):
        if not run.time_left():
            run.say("no time for the others")
            return
        found = race(
            timed.candidates(operation), group=run.group, device=run.device, rounds=rounds
        )  # fmt: skip
        run.row(
            "signalled_experts", **model._asdict(), operation=operation, skew=skew,
            without_peers=os.environ.get("NCCL_P2P_DISABLE", "0"), times_us=found.times_us,
            failures=found.failures,
        )  # fmt: skip
        ms = {name: found.median_us(name) / 1e3 for name in found.times_us}
        run.say(f"{model.name} skew {skew:.2f} {operation}")
        run.say("  " + "  ".join(f"{name} {value:.3f}" for name, value in ms.items()))
        for name, why in found.failures.items():
            run.say(f"  {name} failed: {why[:300]}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=70)
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    os.environ.setdefault("FLUX_MEGATRON_TIMEOUT_S", "30")
    kind, on_gpu = given.device, given.device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    run = gpu_run.start(given.out, given.commit, given.seconds, dtype)
    for shape, (bands, sms) in product(VERIFIED[kind], ((4, 8), (1, 0))):
        if failure := run.failure(partial(verify, run, shape, bands, sms)):
            run.say(f"WRONG: {failure[:2000]}")
            gpu_run.finish(run, 1)
    run.say(f"exact: N, K, experts a rank, rows = {VERIFIED[kind]}")
    for model, skew in product(MODELS[kind], (0.0, 0.33)):
        measure(run, model, skew, given.rounds if on_gpu else 2)
    gpu_run.finish(run)


if __name__ == "__main__":
    main()
