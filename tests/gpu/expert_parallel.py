"""a2a_gemm and gemm_a2a on GPUs: verified, then timed beside all-to-all and grouped GEMM.

    torchrun --standalone --nproc-per-node 2 tests/gpu/expert_parallel.py --out experts.jsonl \\
        --models mixtral      # then: --models fine
    torchrun --standalone --nproc-per-node 2 tests/gpu/expert_parallel.py --device cpu  # rehearsal

Verified for each strategy, forward and backward: small integers, exact, new counts in every call,
eager and in a replayed graph. Timed, in one race a problem and direction: `hopper` and `fused`, the
strategies (where `hopper` runs, `fused` for the first problem of a model, with --portable for all),
`hopper 8` with groups of 8 rows of tiles, `hopper whole` without half tiles; `nccl`,
the collective with splits that are known, a sort of the rows by expert and a grouped GEMM;
`nccl + sync`, which fetches the splits too, as forward of a training step must; the parts of
`nccl`: `gemm`, `a2a`, `wgrad`; and ours: `own gemm`, the first strategy's call with all rows at
home, and `own wgrad`. Backward gives dx and dw. Counts are those of a uniform router, and of one
whose first expert gets a third of all tokens. Prints ms; rows have all rounds.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from unittest import mock

import gpu_run
import torch
from expert_baseline import Baseline, grouped, wgrad
from expert_verification import routed, verify
from gpu_run import Run
from torch import Tensor

from flux_megatron.expert_parallel import fused, hopper, ops
from flux_megatron.expert_parallel import wgrad as wgrads
from flux_megatron.expert_parallel.wgrad import weight_gradient
from flux_megatron.kernels import a2a_gemm, hopper_expert_config
from flux_megatron.problem import Plan
from flux_megatron.tuning.timing import race

LIMIT_S = 95  # of the script
PHASE_S = 50  # of one verification or race, compiling included
BEGUN_S = time.monotonic()


@dataclass(frozen=True)
class Model:
    """An expert's GEMMs: hidden to ffn, and back."""

    name: str
    hidden: int
    ffn: int
    experts: int
    topk: int
    tokens: tuple[int, ...]  # of a rank


TINY = (Model("tiny", 32, 48, 4, 2, (24,)),)
# what is verified, as arguments of `verify`, before the models that use the same kernels
ON_CPU = (((24, 16, 3, 40, 5), TINY),)
ON_GPU = (
    ((1088, 512, 4, 700, 12), (Model("mixtral", 4096, 14336, 8, 2, (4096, 8192)),)),
    (
        (576, 512, 32, 1500, 12),
        (
            Model("fine 2048", 2048, 2048, 64, 8, (4096,)),
            Model("fine 7168", 7168, 2048, 64, 8, (4096,)),
        ),
    ),
)


def plans(run: Run, portable: bool = True) -> dict[str, Plan]:
    """By the name of their strategy: that which calls choose, then the portable one if wanted."""
    x = torch.empty(1, 64, device=run.device, dtype=getattr(torch, run.about.dtype))
    found = {"fused": fused.default_plan(x, 512)}
    if run.device.type == "cuda" and torch.cuda.get_device_capability()[0] == 9:
        found = {"hopper": hopper.default_plan(x, 512)} | (found if portable else {})
    return found


def phase(run: Run, name: str) -> None:
    """From here on a hang is of this phase: the script ends, and prints where its threads are."""
    left_s = LIMIT_S - (time.monotonic() - BEGUN_S)
    run.say(f"[{LIMIT_S - left_s:.0f} s] {name}")
    faulthandler.dump_traceback_later(max(1.0, min(PHASE_S, left_s)), exit=True)


def as_named(name: str, call: Callable) -> Callable:
    """The call; that of "hopper whole" makes no tile of half a tile's rows."""
    if name != "hopper whole":
        return call

    def whole() -> object:
        with mock.patch.object(hopper_expert_config, "HALVES", False):
            return call()

    return whole


@dataclass
class Timed:
    """Operands of one problem: x [rows, hidden] to w and z [capacity, ffn] to v, and back."""

    run: Run
    model: Model
    tokens: int
    skew: float
    portable: bool = True  # the portable kernels too
    others: bool = False  # other orders of tiles too

    def __post_init__(self) -> None:
        run, model = self.run, self.model
        ranks, rank = run.group.size(), run.group.rank()
        experts, self.rows = model.experts // ranks, self.tokens * model.topk
        self.counts = routed(self.rows, ranks, experts, self.skew, rank).to(run.device)
        self.known = Baseline(run, self.counts, False)
        self.came = sum(self.known.received)
        self.capacity = max(self.rows, int(self.known.every.sum((0, 2)).max()))
        self.at_home = torch.zeros_like(self.counts)  # the same rows, none of which travels
        self.at_home[rank] = self.known.every[:, rank].sum(0)
        self.w = self._random(experts, model.ffn, model.hidden)
        self.v = self._random(experts, model.hidden, model.ffn)
        self.x, self.dy = (self._random(self.rows, model.hidden) for _ in range(2))
        self.z, self.dh = (self._random(self.capacity, model.ffn) for _ in range(2))
        self.arrived = self._random(self.came, model.hidden)
        self.plans = plans(run, self.portable)
        (self.first, plan), *_ = self.plans.items()
        self.tried = dict(self.plans)  # forward
        if self.others and self.first == "hopper":
            self.tried["hopper 8"] = replace(plan, tile=replace(plan.tile, group_m=8))
            self.tried["hopper whole"] = plan

    def _random(self, *shape: int) -> Tensor:
        dtype = getattr(torch, self.run.about.dtype)
        return torch.randn(*shape, device=self.run.device, dtype=dtype) / 8

    def candidates(self) -> Iterator[tuple[str, dict[str, Callable]]]:
        yield "a2a_gemm", self.a2a_gemm()
        yield "gemm_a2a", self.gemm_a2a()
        yield "a2a_gemm backward", self.a2a_gemm_backward()
        yield "gemm_a2a backward", self.gemm_a2a_backward()

    def a2a_gemm(self) -> dict[str, Callable]:
        x, w, group, known = self.x, self.w, self.run.group, self.known
        fetched = Baseline(self.run, self.counts, True)
        return {
            **{
                name: as_named(
                    name,
                    lambda plan=plan: ops.a2a_gemm(
                        x, w, self.counts, group, capacity=self.capacity, plan=plan
                    ),
                )
                for name, plan in self.tried.items()
            },
            "nccl": lambda: known.a2a_gemm(x, w),
            "nccl + sync": lambda: fetched.a2a_gemm(x, w),
            "gemm": lambda: grouped(self.arrived, w, known.ends),
            "own gemm": lambda: ops.a2a_gemm(
                self.arrived, w, self.at_home, group, capacity=self.capacity
            ),
            "a2a": lambda: known.exchange(x, known.sent, known.received),
        }

    def gemm_a2a(self) -> dict[str, Callable]:
        z, v, group, known = self.z, self.v, self.run.group, self.known
        fetched = Baseline(self.run, self.counts, True)
        return {
            **{
                name: as_named(
                    name,
                    lambda plan=plan: ops.gemm_a2a(
                        z, v, self.counts, group, tokens=self.rows, plan=plan
                    ),
                )
                for name, plan in self.tried.items()
            },
            "nccl": lambda: known.gemm_a2a(z, v),
            "nccl + sync": lambda: fetched.gemm_a2a(z, v),
            "gemm": lambda: grouped(z[: self.came], v, known.ends),
            "own gemm": lambda: ops.gemm_a2a(z, v, self.at_home, group, tokens=self.came),
            "a2a": lambda: known.exchange(self.arrived, known.received, known.sent),
        }

    def a2a_gemm_backward(self) -> dict[str, Callable]:
        x, w, known = self.x.requires_grad_(), self.w.requires_grad_(), self.known
        made = {
            name: ops.a2a_gemm(x, w, self.counts, self.run.group, capacity=self.capacity, plan=plan)
            for name, plan in self.plans.items()
        }
        received = made[self.first][1]
        dy, plain = self.dh[: self.came], w.detach()
        return {
            **{
                name: lambda y=y: torch.autograd.grad(y, (x, w), self.dh, retain_graph=True)
                for name, (y, _) in made.items()
            },
            "nccl": lambda: known.a2a_gemm_backward(dy, plain, self.arrived),
            "gemm": lambda: grouped(dy, plain, known.ends, "nn"),
            "wgrad": lambda: wgrad(dy, self.arrived, known.ends),
            "own wgrad": lambda: weight_gradient(dy, self.arrived, received),
            "a2a": lambda: known.exchange(self.arrived, known.received, known.sent),
        }

    def gemm_a2a_backward(self) -> dict[str, Callable]:
        z, v, known = self.z.requires_grad_(), self.v.requires_grad_(), self.known
        made = {
            name: ops.gemm_a2a(z, v, self.counts, self.run.group, tokens=self.rows, plan=plan)
            for name, plan in self.plans.items()
        }
        hidden, plain = z.detach()[: self.came], v.detach()
        received = known.every[:, self.run.group.rank()].contiguous()
        return {
            **{
                name: lambda y=y: torch.autograd.grad(y, (z, v), self.dy, retain_graph=True)
                for name, y in made.items()
            },
            "nccl": lambda: known.gemm_a2a_backward(self.dy, plain, hidden),
            "gemm": lambda: grouped(self.arrived, plain, known.ends, "nn"),
            "wgrad": lambda: wgrad(self.arrived, hidden, known.ends),
            "own wgrad": lambda: weight_gradient(self.arrived, hidden, received),
            "a2a": lambda: known.exchange(self.dy, known.sent, known.received),
        }


def measure(run: Run, timed: Timed, rounds: int) -> None:
    """Race and print all operations of a problem."""
    model, tokens, skew = timed.model, timed.tokens, timed.skew
    for operation, calls in timed.candidates():
        if not run.time_left():
            run.say("no time for the others")
            return
        phase(run, f"{model.name}, {tokens} tokens, skew {skew}: {operation}")
        found = race(calls, group=run.group, device=run.device, rounds=rounds)
        run.row(
            "expert_parallel", model=model.name, operation=operation, tokens=tokens, skew=skew,
            plans={name: plan.dumps() for name, plan in timed.plans.items()},
            pushers=a2a_gemm.PUSHERS, times_us=found.times_us, failures=found.failures,
        )  # fmt: skip
        ms = {name: found.median_us(name) / 1e3 for name in found.times_us}
        cells = "  ".join(f"{name} {value:.3f}" for name, value in ms.items())
        none = float("nan")
        faster = [ms.get(other, none) / ms.get(timed.first, none) for other in ("nccl", "fused")]
        run.say(f"  {cells}  x{faster[0]:.2f} of nccl, x{faster[1]:.2f} of fused")
        for name, why in found.failures.items():
            run.say(f"  {name} failed: {why[:300]}")


# what a wrong result may come from: tried without, one after another, for the report
DOUBTS = (
    ("as it is", None),
    ("without half tiles", (hopper_expert_config, "HALVES", False)),
    ("without the library's wgrad", (wgrads, "_library_groups", lambda a, b: False)),
)


def told(call: Callable[[], object]) -> None:
    """Make the call; what it raises is printed here, with what it raised first: the end of a
    capture raises an error of its own.
    """
    try:
        call()
    except Exception:
        traceback.print_exc()
        raise


def exact(run: Run, shape: tuple[int, ...]) -> None:
    """Verify every strategy; end the script if one is wrong, whatever it is tried without."""
    for name, plan in plans(run).items():
        for doubt, without in DOUBTS:
            phase(run, f"{name} {doubt} exact? N, K, experts a rank, rows, calls = {shape}")
            if without is not None:
                setattr(*without)
            failure = run.failure(lambda plan=plan: told(lambda: verify(run, *shape, plan)))
            if not failure:
                break
            run.say(f"{name} {doubt} is wrong: {failure[:4000]}")
        else:
            gpu_run.finish(run, 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=75)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--pushers", type=int, default=a2a_gemm.PUSHERS)
    parser.add_argument("--models", default="", help="only those whose names begin so")
    parser.add_argument("--portable", action="store_true", help="portable kernels in all races")
    parser.add_argument("--others", action="store_true", help="other orders of tiles too")
    given = parser.parse_args()
    a2a_gemm.PUSHERS = given.pushers
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    os.environ.setdefault("FLUX_MEGATRON_TIMEOUT_S", "30")
    on_gpu = given.device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    run = gpu_run.start(given.out, given.commit, given.seconds, dtype)
    for shape, all_models in ON_GPU if on_gpu else ON_CPU:
        models = [model for model in all_models if model.name.startswith(given.models)]
        if not models or not run.time_left():
            continue
        exact(run, shape)
        for model in models:
            for number, (tokens, skew) in enumerate(product(model.tokens, (0.0, 0.33))):
                portable = given.portable or number == 0
                timed = Timed(run, model, tokens, skew, portable, given.others)
                measure(run, timed, given.rounds if on_gpu else 2)
    gpu_run.finish(run)


if __name__ == "__main__":
    main()
