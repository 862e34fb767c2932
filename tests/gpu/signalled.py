"""`signalled` by kernel, groups and SMs left to NCCL: measured beside predicted, and its peers.

    torchrun --nproc-per-node 2 tests/gpu/signalled.py signalled.jsonl
    TRITON_INTERPRET=1 torchrun --nproc-per-node 2 tests/gpu/signalled.py signalled.jsonl

1. Exact: many calls of small and large operands of small integers, eager and replayed, in groups of
   every kind, by the Hopper kernel and by the portable one, beside `sequential`. AG+GEMM too, whose
   GEMMs are the library's.
2. Curves: the collectives on communicators of so many CTAs, by size.
3. Races on random data: GPT-3's proj and fc2 by several groupings, each beside its prediction by
   the measured curve, the best predicted groups among them; one by the portable kernel; both
   kernels and the GEMM alone; GEMM and NCCL one after the other, eager and as a graph; and the
   strategies that need symmetric memory.

A wrong result ends the run with exit code 1; what lasts longer than `--seconds` is left out, and a
hang ends it with a traceback. Without GPUs the same in small, which shows that the script works.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import gpu_run
import torch
import torch.distributed as dist
import typer
from gpu_run import Run
from torch import Tensor

from flux_megatron import ops
from flux_megatron.bench.efficiency import baselines
from flux_megatron.kernels import hopper_gemm
from flux_megatron.kernels.signalled_gemm import bands, table_of
from flux_megatron.overlap import registry, signalled
from flux_megatron.overlap.registry import overlapping
from flux_megatron.patterns import COLUMN, ROW, Pattern
from flux_megatron.perf.band_plans import band_model, best_plans
from flux_megatron.perf.hardware import H200, find
from flux_megatron.perf.wave_groups import Curve
from flux_megatron.problem import MAX_GROUPS, Plan, Problem
from flux_megatron.symm.signals import WORK_WORDS
from flux_megatron.symm.workspace import workspace
from flux_megatron.tuning import choice
from flux_megatron.tuning.timing import race

GRACE_S = 15
PATTERNS = (ROW, Pattern.GEMM_AR, COLUMN)
EPOCHS = {"cuda": 50, "cpu": 2}
MODEL = {"cuda": (12288, 49152), "cpu": (32, 64)}  # hidden and FFN size
ROWS = {"cuda": (8192, 2048), "cpu": (64,)}
CURVE_MIB = {"cuda": (1, 4, 16, 64, 200), "cpu": (1 / 1024, 1 / 256, 1 / 64)}
COMM_SMS = (4, 8, 16)
GROUPS = (4, 8)


def problem(pattern: Pattern, M: int, K: int, run: Run) -> Problem:
    """K is the FFN size or the hidden one; of AG+GEMM, which is the dual, it is N."""
    kind = run.device.type
    dtype = str(run.about.dtype).removeprefix("torch.")
    hidden = MODEL[kind][0]
    N, K = (K, hidden) if pattern.spec.gathers else (hidden, K)
    return Problem(pattern, M, N, K, dtype, run.group.size(), "nt", kind)


def grouped(asked: Problem, groups: int, comm_sms: int) -> Plan:
    return signalled._plan(asked, groups, comm_sms)


def _not_raced(*bands: object) -> str:  # a Mock takes as long as a small GEMM
    return "the portable kernel is raced"


def by_portable(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The same call by the portable kernel, whatever the bands."""

    def made() -> Tensor:
        with mock.patch.object(hopper_gemm, "refuses_bands", _not_raced):
            return call()

    return made


def dtype_of(run: Run) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, run.about.dtype)
    return dtype


class Operands:
    """Random ones; or, to be compared, sparse small integers, of which every sum is exact in bf16:
    a GEMM of these runs up to 15 % faster.
    """

    def __init__(self, asked: Problem, run: Run, exact: bool = False) -> None:
        made = torch.Generator(run.device).manual_seed(1 + run.group.rank())
        kept = min(1.0, (64 / asked.K) ** 0.5)  # sums of 64 terms, on average

        def operand(*shape: int) -> Tensor:
            if not exact:
                return torch.randn(shape, device=run.device, generator=made).to(dtype_of(run))
            signs = torch.rand(shape, device=run.device, generator=made) - 0.5
            few = torch.rand(shape, device=run.device, generator=made) < kept
            return (signs.sign() * few).to(dtype_of(run))

        self.x = operand(asked.x_rows, asked.K_local)
        self.w = operand(asked.N_local, asked.K_local)
        self.whole = self.x.repeat(asked.world_size, 1) if asked.spec.gathers else self.x
        self.asked, self._group = asked, run.group

    def call(self, plan: Plan) -> Callable[[], Tensor]:
        operation = ops.OPERATIONS[self.asked.pattern]
        return lambda: operation(self.x, self.w, self._group, plan=plan)

    def gemm(self) -> Tensor:
        """Alone: of a gather, on rows of one rank."""
        return self.whole @ self.w.t()

    @property
    def shards(self) -> int:
        return self._group.size() if self.asked.spec.scatters else 1

    def kernel_of(self, plan: Plan) -> Callable[..., None]:
        """The kernel that makes the plan's bands, unless the portable one is asked for."""
        made = bands(
            self.asked.M // self.shards, self.asked.N, self.shards, plan.group_rows, plan.tile
        )
        return signalled.kernel_of(self.x, self.w, self.asked.N, made, self.shards, plan.tile)

    def kernel_name(self, plan: Plan) -> str:
        if self.asked.spec.gathers:
            return "library"
        return self.kernel_of(plan).__module__.rpartition(".")[2]

    def kernel(self, plan: Plan) -> Callable[[], Tensor]:
        """The GEMM of the plan in one band, without collectives: y, or what is scattered."""
        rows, out = self.asked.M // self.shards, self.x.new_empty(self.asked.M, self.asked.N)
        made = bands(rows, self.asked.N, self.shards, (), plan.tile)
        counters, work = (
            torch.zeros(words, dtype=torch.int32, device=self.x.device)
            for words in (MAX_GROUPS, WORK_WORDS)
        )
        given = {
            "table": table_of(made, self.x.device), "tiles": made[0].tiles, "shards": self.shards,
            "counters": counters, "work_counter": work, "spare_sms": plan.comm_sms,
            "layout": "nt", "tile": plan.tile,
        }  # fmt: skip

        def call() -> Tensor:
            counters.zero_()
            self.kernel_of(plan)(self.x, self.w, out, **given)
            return out

        return call

    def serial(self) -> Tensor:
        if self.asked.spec.gathers:
            gathered = torch.empty_like(self.whole)
            dist.all_gather_into_tensor(gathered, self.x, group=self._group)
            return gathered @ self.w.t()
        y = self.gemm()
        if self.asked.spec.scatters:
            scattered = y.new_empty(self.asked.M_shard, y.shape[1])
            dist.reduce_scatter_tensor(scattered, y, group=self._group)
            return scattered
        dist.all_reduce(y, group=self._group)
        return y


def replayed(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The call as a graph; the call itself where there is no GPU."""
    if not torch.cuda.is_available():
        return call
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def verify(run: Run) -> bool:
    """Whether every grouping is exact, over many epochs, by both kernels; of the second size the
    Hopper kernel takes the all-reduce, of the third nothing.
    """
    good, kinds = True, {"eager": lambda call: call, "replay": replayed}
    kinds["portable replay"] = lambda call: replayed(by_portable(call))
    (hidden, ffn), rows = MODEL[run.device.type], ROWS[run.device.type][-1]
    for pattern in PATTERNS:
        for M, K in ((rows, hidden), (rows - 48, hidden), (run.group.size() * 37, ffn)):
            asked = problem(pattern, M, K, run)
            given = Operands(asked, run, exact=True)
            expected = given.serial()
            numbers = ((1, 0), (4, 8), (15, 16))
            tried = [grouped(asked, groups, comm_sms) for groups, comm_sms in numbers]
            by_facts = choice.of_strategy(asked, "signalled", workspace(run.group, run.device))
            for plan in dict.fromkeys([*tried, by_facts]):
                kernel = given.kernel_name(plan)
                for kind, wrap in kinds.items():
                    if kind.startswith("portable") and pattern is COLUMN:
                        continue
                    wrong, failure = _wrong(run, given, plan, expected, wrap)
                    good = good and not wrong and not failure
                    run.row(
                        "signalled exact", pattern=str(pattern), M=M, K=K, kind=kind,
                        kernel=kernel, plan=plan.dumps(), wrong=wrong, failure=failure,
                    )  # fmt: skip
                    if wrong or failure:
                        run.say(
                            f"WRONG {asked} {kernel} {kind} groups {plan.group_rows} "
                            f"{plan.comm_sms}: {wrong} {failure}"
                        )
    return good


def _wrong(run: Run, given: Operands, plan: Plan, expected: Tensor, wrap) -> tuple[int, str]:
    """How many of the calls are wrong on some rank, or why they fail."""
    wrong = torch.zeros(1, device=run.device)

    def calls() -> None:
        call = wrap(given.call(plan))
        for _ in range(EPOCHS[run.device.type]):
            wrong.add_((call() != expected).any())

    failure = run.failure(calls)
    return int(run.slowest(wrong)), failure


def curves(run: Run) -> dict[tuple[Pattern, int], Curve]:
    """The collectives of each pattern, by the SMs that they may hold; 0: the group's own NCCL."""
    kind, found = run.device.type, {}
    space = workspace(run.group, run.device)
    sizes = [int(mib * 2**20) for mib in CURVE_MIB[kind]]
    ranks, element = run.group.size(), dtype_of(run).itemsize
    block = torch.zeros(sizes[-1] // element, dtype=dtype_of(run), device=run.device)
    shard = torch.empty_like(block[: block.numel() // ranks])

    def collective(pattern: Pattern, comm_sms: int, size: int) -> Callable[[], object]:
        group, n = signalled.communicator(space, comm_sms), size // element // ranks * ranks
        if pattern is ROW:
            return lambda: group._reduce_scatter_base(
                shard[: n // ranks], block[:n], signalled._SUM
            ).wait()
        if pattern is COLUMN:
            return lambda: group._allgather_base(block[:n], shard[: n // ranks]).wait()
        return lambda: group.allreduce([block[:n]]).wait()

    for pattern in PATTERNS:
        for comm_sms in (0, *COMM_SMS):
            calls = {f"{size}": collective(pattern, comm_sms, size) for size in sizes}
            timed = race(calls, group=run.group, device=run.device, rounds=6)
            times = tuple(timed.median_us(name) for name in calls)
            found[pattern, comm_sms] = Curve(tuple(map(float, sizes)), times)
            run.row(
                "signalled curve", pattern=str(pattern), comm_sms=comm_sms, sizes=sizes, us=times
            )
            trips = pattern.spec.trips * (ranks - 1) / ranks
            cells = "  ".join(
                f"{us:7.0f} us {trips * size / us * 1e-3:4.0f} GB/s"
                for size, us in zip(sizes, times, strict=True)
            )
            run.say(f"{pattern} collective, {comm_sms:2} SMs, {CURVE_MIB[kind]} MiB: {cells}")
    return found


def plans(asked: Problem, run: Run, curve: dict, facts) -> Iterator[tuple[str, Plan]]:
    for groups in GROUPS:
        yield f"{groups} groups, 8 SMs", grouped(asked, groups, 8)
    yield "4 groups, 0 SMs", grouped(asked, 4, 0)
    predicted = best_plans(
        asked, grouped(asked, 1, 16), facts, lambda sms: curve[asked.pattern, sms]
    )
    for plan in predicted:
        yield f"predicted, {plan.comm_sms} SMs", plan
    if not asked.spec.gathers:
        yield f"portable, predicted, {predicted[0].comm_sms} SMs", predicted[0]
    space = workspace(run.group, run.device)
    yield "by the facts", choice.of_strategy(asked, "signalled", space)
    yield "sequential", Plan("sequential")
    for name in overlapping(asked, "auto", space.unavailable)[0]:
        if name != "signalled":
            yield name, registry.strategy(asked, name).default_plan(asked)


def measure(run: Run, asked: Problem, curve: dict, rounds: int) -> None:
    """One race: every candidate beside its prediction."""
    given = Operands(asked, run)
    facts = find(run.about.gpu, "nvlink") or H200
    named = dict(plans(asked, run, curve, facts))
    calls: dict[str, Callable[[], object]] = {"gemm": given.gemm, "serial": given.serial}
    calls["serial, graph"] = replayed(given.serial)
    for spare in () if asked.spec.gathers else (0, 8):
        alone = given.kernel(grouped(asked, 1, spare))
        calls[f"kernel alone, {spare} SMs spared"] = alone
        calls[f"portable kernel alone, {spare} SMs spared"] = by_portable(alone)
    for name, plan in named.items():
        call = given.call(plan)
        calls[name] = by_portable(call) if name.startswith("portable") else call
    calls["4 groups, 8 SMs, graph"] = replayed(given.call(named["4 groups, 8 SMs"]))
    timed = race(calls, group=run.group, device=run.device, rounds=rounds)
    medians = {name: timed.median_us(name) for name in timed.times_us}
    serial = min(medians["serial"], medians["serial, graph"])
    scale = baselines({"gemm": medians["gemm"], "serial": serial})
    run.say(f"{asked}\n  {'us':>8} {'E':>6} {'predicted':>9}")
    for name in calls:
        if name in timed.failures:
            run.say(f"  {name}: {timed.failures[name]}")
            continue
        plan, predicted, kernel = named.get(name.removesuffix(", graph")), None, None
        if plan is not None and plan.strategy == "signalled":
            portable = name.startswith("portable")
            kernel = "signalled_gemm" if portable else given.kernel_name(plan)
            known = replace(facts, hopper=facts.hopper and not portable)
            model = band_model(asked, plan, known, curve=curve[asked.pattern, plan.comm_sms])
            predicted = model.finish_us(plan.group_rows)
        efficiency = scale.efficiency(medians[name]) if scale else None
        run.row(
            "signalled", pattern=str(asked.pattern), M=asked.M, N=asked.N, K=asked.K,
            candidate=name, kernel=kernel, plan=plan and plan.dumps(), median_us=medians[name],
            times_us=timed.times_us[name], efficiency=efficiency, predicted_us=predicted,
            data="random",
        )  # fmt: skip
        groups = plan.group_rows if plan and ("predicted" in name or "facts" in name) else ""
        shown = (f"{medians[name]:8.0f}", f"{efficiency or 0:6.2f}", f"{predicted or 0:9.0f}")
        run.say(f"  {' '.join(shown)}  {name} {groups}")


def everything(run: Run, rounds: int) -> int:
    """The exit code."""
    run.say(f"connections {run.about.max_connections}")
    if not verify(run):
        return 1
    run.say("every grouping is exact, eager and replayed")
    curve = curves(run)
    hidden, ffn = MODEL[run.device.type]
    for M in ROWS[run.device.type]:
        for K in (ffn, hidden):
            for pattern in PATTERNS:
                if not run.time_left():
                    run.say("no time for the others")
                    return 0
                measure(run, problem(pattern, M, K, run), curve, rounds)
    return 0


def main(out: Path, commit: str = "", seconds: float = 100, rounds: int = 6) -> None:
    """Be one of the ranks."""
    faulthandler.dump_traceback_later(seconds + GRACE_S, exit=True)
    on_gpu = torch.cuda.is_available()
    run = gpu_run.start(out, commit, seconds, torch.bfloat16 if on_gpu else torch.float32)
    gpu_run.finish(run, everything(run, rounds))


if __name__ == "__main__":
    typer.run(main)
