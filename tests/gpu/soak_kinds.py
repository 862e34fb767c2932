"""Random kinds of calls for the soak: what is called, on which shapes, by which plan.

A kind is drawn from its number and the seed alone, and so are its operands: every rank makes those
of all ranks, and the results that follow from them, on its own device.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from closeness import assert_sums_exact
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron import ops, pieces
from flux_megatron.dispatch import decide
from flux_megatron.kernels.hopper import config as hopper_config
from flux_megatron.kernels.hopper.split_tiles import K_TILES_MIN
from flux_megatron.lab import reference
from flux_megatron.overlap import calls, hopper, registry
from flux_megatron.problem import Pattern, Plan, Problem, Tile

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PIECES = {"ag_gemm": 6, "row backward": 3, "gemm_rs": 7, "column backward": 4}
TILES = [Tile(16, 32, 32), Tile(64, 64, 32, group_m=2)]


@dataclass(frozen=True)
class Kind:
    """`M_shard, N, K` are those of the GEMM on one rank. Plan None: what the library chooses."""

    number: int
    piece: str
    M_shard: int
    N: int
    K: int
    dtype: torch.dtype
    layout: str
    bias: bool
    plan: Plan | None

    @property
    def gathers(self) -> bool:
        return self.piece in ("ag_gemm", "row backward")

    def problem(self, world_size: int, device: str) -> Problem:
        return Problem(
            pattern=Pattern.AG_GEMM if self.gathers else Pattern.GEMM_RS,
            M=world_size * self.M_shard,
            N=self.N * (world_size if self.gathers else 1),
            K=self.K * (1 if self.gathers else world_size),
            dtype=str(self.dtype).removeprefix("torch."),
            world_size=world_size,
            layout=self.layout,
            device=device,
        )


def kinds(
    count: int, seed: int, world_size: int, device: str, small: bool, portable: bool
) -> list[Kind]:
    """`count` kinds, of every strategy that this machine must have; `small`: none has many tiles;
    `portable`: none runs a kernel for Hopper alone. `RuntimeError` if `hopper` cannot run on a
    Hopper GPU.
    """
    draws = ((number, random.Random(f"{seed} {number}")) for number in range(count))
    return [_kind(number, draw, world_size, device, small, portable) for number, draw in draws]


def _kind(
    number: int, draw: random.Random, world_size: int, device: str, small: bool, portable: bool
) -> Kind:
    (piece,) = draw.choices([*PIECES], [*PIECES.values()])
    layout = {"row backward": "nn", "column backward": "nn"}.get(piece) or draw.choice(["nt", "nn"])
    common = {"number": number, "piece": piece, "layout": layout}
    common["bias"] = piece == "ag_gemm" and draw.random() < 0.5
    if number % 2 and not portable and on_hopper(device):
        kind = _hopper_kind(draw, world_size, common, small)
        if reason := hopper.supports(kind.problem(world_size, device)):
            raise RuntimeError(
                f"a Hopper GPU, but `hopper` cannot run {kind.problem(world_size, device)}: "
                f"{reason}; --portable leaves it out"
            )
        return kind
    # interpreted kernels take milliseconds a tile
    rows, columns = (400, 300) if device == "cuda" else (24, 24)
    kind = Kind(
        **common,
        M_shard=draw.randint(1, rows) * (1 if small or number % 12 else 5),  # a large one at times
        N=draw.randint(1, columns),
        K=draw.randint(1, 30),
        dtype=draw.choice(DTYPES),
        plan=None,
    )
    plans = [*_plans(draw, kind.M_shard), *([] if portable else [None])]
    if not kind.gathers:
        band = 1 + kind.M_shard // 3
        plans.append(Plan("signalled", tile=TILES[0], group_rows=(band, band), comm_sms=8))
    return replace(kind, plan=draw.choice(plans))


def on_hopper(device: str) -> bool:
    """Whether `hopper` must be among the kinds."""
    return device == "cuda" and torch.cuda.get_device_capability()[0] == 9


def _plans(draw: random.Random, M_shard: int) -> Iterator[Plan]:
    rows = draw.choice([0, 7, 24, 1 + M_shard // 3])
    for tile in TILES:
        yield Plan("fused", comm_rows=rows, tile=tile)
    yield Plan("pipelined", comm_rows=rows)
    yield Plan("pipelined", gemms=2)
    yield Plan("sequential")


def _hopper_kind(draw: random.Random, world_size: int, common: dict, small: bool) -> Kind:
    gathers = common["piece"] in ("ag_gemm", "row backward")
    a_chunk_each = K_TILES_MIN * (world_size - 1) * hopper_config.TILE.block_k
    Ks = [64, 72, 520, 2056] if gathers else [64, 520, *range(a_chunk_each, a_chunk_each + 24, 8)]
    most = 1 if small else draw.choice([1, 1, 1, 3])
    kind = Kind(
        **common,
        M_shard=draw.choice([128, 256, 384] if gathers else [1, 37, 128, 200, 333]) * most,
        N=draw.choice([128, 136, 520, 1000]) * most,
        K=draw.choice(Ks),
        dtype=draw.choice([torch.bfloat16, torch.float16]),
        plan=None,
    )
    problem = kind.problem(world_size, "cuda")
    plan = draw.choice([hopper.default_plan(problem), *hopper.candidates(problem)])
    if not gathers:
        plan = replace(plan, transport=draw.choice(["sm", "copy_engine"]))
    rows = draw.choice([0, plan.comm_rows, 64, 1 + kind.M_shard // 3])
    return replace(kind, plan=replace(plan, comm_rows=rows))


class Operands:
    """This rank's operands of a kind, and its results; all sums of them are exact."""

    def __init__(self, kind: Kind, seed: int, group: ProcessGroup, device: torch.device) -> None:
        self.kind, self.group = kind, group
        self._draw = torch.Generator(device).manual_seed(1000 * seed + kind.number)
        self._device, ranks, rank = device, range(group.size()), group.rank()
        self._sum = kind.K * (1 if kind.gathers else group.size())
        rows = kind.M_shard * (1 if kind.gathers else group.size())
        x = [self._integers(rows, kind.K) for _ in ranks]
        w = [self._integers(kind.K, kind.N) for _ in ranks]
        bias = [self._integers(kind.N) for _ in ranks]
        layer_x = [self._integers(kind.M_shard, kind.N) for _ in ranks]
        if kind.gathers:
            self.gathered = torch.cat(x)
            assert_sums_exact(self.gathered, w[rank], extra=1)
            own_bias = [bias[rank]] if kind.bias else None
            self.y = reference.all_gather_gemm(x, [w[rank]], "nn", own_bias)[0]
        else:
            self.gathered = torch.cat(layer_x)
            assert_sums_exact(torch.cat(x, 1), torch.cat(w))
            self.y = reference.gemm_reduce_scatter(x, w, "nn")[rank]
        self.x, self.layer_x = x[rank], layer_x[rank]
        self.bias = bias[rank] if kind.bias else None
        self.w = w[rank].t().contiguous() if kind.layout == "nt" else w[rank]

    def _integers(self, *shape: int) -> Tensor:
        """-1, 0 and 1, so many that a sum of terms stays near 60."""
        kept = min(2 / 3, (60 / self._sum) ** 0.5)
        chance = torch.rand(shape, generator=self._draw, device=self._device)
        return ((chance < kept / 2).int() - (chance > 1 - kept / 2).int()).to(self.kind.dtype)

    def call(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Make the call; pairs of what it gives and what it must give, to be compared at once."""
        kind, group = self.kind, self.group
        if kind.piece == "gemm_rs":
            scatter = pieces.start_gemm_rs(
                self.x, self.w, group, layout=kind.layout, plan=kind.plan
            )
            yield scatter.finish(), self.y
        elif kind.piece == "column backward":
            yield from self._column_backward()
        else:
            borrowed: list[Tensor] = []
            y = ops.run_ag_gemm(
                self.x, self.w, self.bias, group, layout=kind.layout, plan=kind.plan,
                consume=(lambda rows: borrowed.append(rows.clone()))
                if kind.piece == "row backward" else None,
            )  # fmt: skip
            yield y, self.y
            for rows in borrowed:
                yield rows, self.gathered

    def _column_backward(self) -> Iterator[tuple[Tensor, Tensor]]:
        """`pieces.start_gather_and_gemm_rs` by the plan of the kind: x gathered, dy scattered."""
        decision = decide(Pattern.GEMM_RS, self.x, self.w, None, self.group, "nn", self.kind.plan)
        decision.count()
        space = decision.workspace
        plan = decision.gather_plan()
        gather = calls.start_gather(registry.gather_rows(plan), self.layer_x, plan, space)
        scatter = calls.start(decision.build, self.x, self.w, "nn", decision.plan, space)
        rows = gather.complete()
        torch.mm(self.x.t(), rows)  # wgrad
        yield rows, self.gathered
        gather.close()
        yield scatter.finish(), self.y
