"""The calls of virtual ranks: back-to-back calls of a strategy on small integers, exact to the bit.

Every call brings new data in the same input tensors, which are overwritten as soon as the call
allows it. Sizes may grow from call to call. Calls may be replays of a graph, mixed with eager ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor
from virtual_hosts import VirtualCase, VirtualHost, run_hosts
from virtual_machine import Machine, PackageCopy
from virtual_ranks import STREAMS, Schedule, Scheduler

from flux_megatron.lab import reference
from flux_megatron.patterns import Pattern
from flux_megatron.scaling import Scaling, block_shapes


@dataclass(frozen=True)
class Case(VirtualCase):
    """`host` names one of `STEPS`; `rows` is M_shard of each call; `N, K` are a rank's sizes."""

    host: str
    strategy: str = "fused"
    world_size: int = 2
    rows: tuple[int, ...] = (20, 20, 20)
    N: int = 24
    K: int = 16
    comm_rows: int = 8
    block: int = 16
    layout: str = "nt"
    bias: bool = False
    dtype: torch.dtype = torch.float32
    scaled: bool = False  # FP8 operands, a scale each
    split: bool = False  # and a split accumulator
    blockwise: bool = False  # and a scale a block
    wire: bool = False  # and e4m3 on the wire, of `hopper`
    rounds: bool = False  # partials of 256 and of 1, whose sum differs if it is rounded on the way
    tma: bool = False
    ctas: int = 3  # of a persistent kernel
    captured: bool = False  # two calls of three are replays of a graph
    two_streams: bool = False  # of the caller, in turn
    last_epoch: int = 0  # of the calls before
    mailboxes: bool = False  # copy engines alone reach other ranks
    # of `hopper`
    transport: str = "copy_engine"
    lacking: int = 0  # rows of the last rank, in GEMM+AR
    block_n: int = 0  # 0: as `block`
    # of `low_latency`
    two_phase: bool = False
    parts: int = 0  # of K
    # of `signalled`
    group_rows: tuple[int, ...] = ()
    comm_sms: int = 0
    gluon: bool = False  # by its Hopper kernel

    def run(self, package: PackageCopy, schedule: Schedule) -> Scheduler:
        given = self.last_epoch, self.mailboxes
        machine = Machine(package, self.world_size, self.ctas, ("gather", "scatter"), *given)
        refuses = mock.Mock(return_value=None if self.gluon else "not asked for")
        refused = {"refuses_bands": refuses, "refuses_gathered": refuses}
        with mock.patch.multiple(package.hopper_gemm, **refused):
            return run_hosts(Host, self, Operands(self), machine, schedule)

    @property
    def calls(self) -> int:
        return len(self.rows)


class Operands:
    """Integers for every call and rank: ag_x [M_shard, K], rs_x [M, K], w as laid out, bias [N]."""

    def __init__(self, case: Case) -> None:
        self.case, random = case, torch.Generator().manual_seed(0)

        dtype = torch.float8_e4m3fn if case.scaled else case.dtype

        def integers(*shape: int) -> Tensor:
            return torch.randint(-2, 3, shape, generator=random).to(dtype)

        ranks = range(case.world_size)
        w_shape = (case.N, case.K) if case.layout == "nt" else (case.K, case.N)
        self.w = [integers(*w_shape) for _ in ranks]
        self.bias = [integers(case.N).to(case.dtype) for _ in ranks] if case.bias else None
        self.ag_x = [[integers(rows, case.K) for _ in ranks] for rows in case.rows]
        all_rows = [rows * case.world_size - case.lacking for rows in case.rows]
        self.rs_x = [[integers(rows, case.K) for _ in ranks] for rows in all_rows]
        self.scales: list[dict[str, list[Tensor]]] = [{} for _ in case.rows]
        if case.blockwise:  # other ones in each call
            for scales, rows in zip(self.scales, case.rows, strict=True):
                x_rows = rows if case.host == "ag" else rows * case.world_size
                shapes = block_shapes(x_rows, case.N, case.K)
                for name, shape in zip(("x_scale", "w_scale"), shapes, strict=True):
                    scales[name] = [integers(*shape).float().exp2() for _ in ranks]
        elif case.scaled:  # all ranks have one scale of gathered rows
            own = [0 if case.host == "ag" else rank for rank in ranks]
            for scales in self.scales:
                scales["x_scale"] = [torch.tensor([2.0 ** (1 + one)]) for one in own]
                scales["w_scale"] = [torch.tensor([2.0 ** (2 * rank - 1)]) for rank in ranks]
        if case.wire:  # partials of four bits, and tiles with scales of their own
            for matrix in [*self.w, *(x for of_ranks in self.rs_x for x in of_ranks)]:
                powers = torch.arange(len(matrix)).floor_divide(case.block).exp2()
                matrix.copy_(matrix.float() * powers[:, None])[:, 2:] = 0
        if case.rounds:
            for w in self.w:
                w.zero_()[..., 0] = 1  # "nt": a partial is the first column of x
            for of_ranks in self.rs_x:
                for rank, x in enumerate(of_ranks):
                    x[:, 0] = 1 if rank else 256

    def expected(self, what: str, call: int) -> list[Tensor]:
        case = self.case
        if what == "gathered":
            return [torch.cat(self.ag_x[call])] * case.world_size
        scaled = {**self.scales[call], "out_dtype": case.dtype} if case.scaled else {}
        if what == "ag":
            x = self.ag_x[call]
            return reference.all_gather_gemm(x, self.w, case.layout, self.bias, **scaled)
        if what == "ar":
            return reference.gemm_all_reduce(self.rs_x[call], self.w, case.layout)
        return reference.gemm_reduce_scatter(self.rs_x[call], self.w, case.layout, **scaled)


class Host(VirtualHost):
    OPERANDS = ("ag_x", "rs_x")

    def __init__(self, case: Case, operands: Operands, machine: Machine, rank: int) -> None:
        super().__init__(case, operands, machine, rank)
        package: PackageCopy = machine.package
        self.strategy = getattr(package, case.strategy)
        block_n = case.block_n or case.block
        tile = package.problem.Tile(case.block, block_n, case.block, group_m=2, tma=case.tma)
        plan = {
            "strategy": case.strategy, "comm_rows": case.comm_rows, "tile": tile,
            "transport": case.transport, "two_phase": case.two_phase,
            "group_rows": case.group_rows, "comm_sms": case.comm_sms,
            "gemms": case.parts, "k_parts": case.parts,
        }  # fmt: skip
        self.plan = package.problem.Plan(**package.problem.own_fields(plan))
        self.bias = operands.bias[rank] if operands.bias is not None else None
        self.w = operands.w[rank]
        self.scaling: Scaling | None = None
        self.calls, self.builders = package.calls, self.strategy.BUILDERS

    def begin(self, call: int) -> list[Tensor]:
        if self.case.two_streams:
            self.machine.scheduler.use_stream(STREAMS[call % 2])
        scales = [
            self.input(name, of_ranks[self.rank])
            for name, of_ranks in self.operands.scales[call].items()
        ]
        if scales:
            how = self.case.dtype, self.case.split, self.case.blockwise, self.case.wire
            self.scaling = Scaling(*scales, *how)
        return super().begin(call)

    def step(self, call: int, ag_x: Tensor, rs_x: Tensor) -> dict[str, Tensor]:
        return STEPS[self.case.host](self, ag_x, rs_x, call % 2 == 1)

    def start(self, pattern: Pattern, x: Tensor):
        given = x, self.w, self.case.layout, self.plan, self.space, self.scaling
        return self.calls.start(self.builders[pattern], *given)


def ag(host: Host, ag_x: Tensor, rs_x: Tensor, consumes: bool) -> dict[str, Tensor]:
    """AG+GEMM, with or without a consumer of the gathered rows."""
    results = {}

    def keep(gathered: Tensor) -> None:
        results["gathered"] = torch.empty_like(gathered).copy_(gathered)

    results["ag"] = host.calls.whole(
        host.builders[Pattern.AG_GEMM], ag_x, host.w, host.bias, host.case.layout, host.plan,
        host.space, keep if consumes else None, host.scaling,
    )  # fmt: skip
    return results


def rs(host: Host, ag_x: Tensor, rs_x: Tensor, consumes: bool) -> dict[str, Tensor]:
    """GEMM+RS; the input is overwritten before the result is asked for."""
    scatter = host.start(Pattern.GEMM_RS, rs_x)
    rs_x.fill_(float("nan"))
    return {"rs": scatter.finish()}


def ar(host: Host, ag_x: Tensor, rs_x: Tensor, consumes: bool) -> dict[str, Tensor]:
    """GEMM+AR; the input is overwritten before the result is asked for."""
    reduction = host.start(Pattern.GEMM_AR, rs_x)
    rs_x.fill_(float("nan"))
    return {"ar": reduction.finish()}


def backward(host: Host, ag_x: Tensor, rs_x: Tensor, consumes: bool) -> dict[str, Tensor]:
    """A column-parallel layer's backward: a gather and a reduce-scatter at the same time."""
    build = host.machine.package.gather.gather_rows
    gather = host.calls.start_gather(build, ag_x, host.plan, host.space)
    scatter = host.start(Pattern.GEMM_RS, rs_x)
    gathered = gather.complete()
    kept = torch.empty_like(gathered).copy_(gathered)
    gather.close()
    return {"gathered": kept, "rs": scatter.finish()}


Step = Callable[[Host, Tensor, Tensor, bool], dict[str, Tensor]]
STEPS: dict[str, Step] = {"ag": ag, "rs": rs, "ar": ar, "backward": backward}
