"""Random kinds of calls for the soak: what is called, on which shapes, by which plan.

A kind is drawn from its number and the seed alone, and so are its operands: every rank makes those
of all ranks, and the results that follow from them, on its own device.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import cases
import torch
from cases import Case
from closeness import small_integers
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron import ops, pieces
from flux_megatron.dispatch import decide
from flux_megatron.kernels.hopper import config as hopper_config
from flux_megatron.kernels.hopper.split_tiles import K_TILES_MIN
from flux_megatron.overlap import calls, hopper, registry
from flux_megatron.problem import Pattern, Plan, Problem, Tile

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PIECES = {"ag_gemm": 6, "row backward": 3, "gemm_rs": 7, "column backward": 4}
GATHERS = ("ag_gemm", "row backward")
TILES = [Tile(16, 32, 32), Tile(64, 64, 32, group_m=2)]


@dataclass(frozen=True)
class Kind:
    """A case without a plan is called by what the library chooses."""

    piece: str
    case: Case


def kinds(
    count: int, seed: int, world_size: int, device: str, small: bool, portable: bool
) -> list[Kind]:
    """`count` kinds, of every strategy that this machine must have; `small`: none has many tiles;
    `portable`: none runs a kernel for Hopper alone. `RuntimeError` if `hopper` cannot run on a
    Hopper GPU.
    """
    return [_kind(number, seed, world_size, device, small, portable) for number in range(count)]


def _kind(
    number: int, seed: int, world_size: int, device: str, small: bool, portable: bool
) -> Kind:
    draw = random.Random(f"{seed} {number}")
    (piece,) = draw.choices([*PIECES], [*PIECES.values()])
    bias, forward = piece == "ag_gemm" and draw.random() < 0.5, piece in ("ag_gemm", "gemm_rs")
    common = {
        "pattern": "ag_gemm" if piece in GATHERS else "gemm_rs",
        "layout": draw.choice(["nt", "nn"]) if forward else "nn",
        "bias": bias, "seed": 1000 * seed + number,
    }  # fmt: skip
    if number % 2 and not portable and on_hopper(device):
        case = _hopper_case(piece, draw, world_size, common, small)
    else:
        case = _portable_case(number, draw, device, common, small, portable)
    terms = case.K_local * (1 if piece in GATHERS else world_size)
    return Kind(piece, replace(case, kept=min(1.0, 1.5 * (60 / terms) ** 0.5)))  # sums near 60


def _portable_case(
    number: int, draw: random.Random, device: str, common: dict, small: bool, portable: bool
) -> Case:
    # interpreted kernels take milliseconds a tile
    rows, columns = (400, 300) if device == "cuda" else (24, 24)
    M_shard = draw.randint(1, rows) * (1 if small or number % 12 else 5)  # a large one at times
    third = 1 + M_shard // 3
    comm_rows = draw.choice([0, 7, 24, third])
    plans = [
        *(Plan("fused", comm_rows=comm_rows, tile=tile) for tile in TILES),
        Plan("pipelined", comm_rows=comm_rows), Plan("pipelined", gemms=2), Plan("sequential"),
        *([] if portable else [None]),
    ]  # fmt: skip
    if common["pattern"] == "gemm_rs":
        plans.append(Plan("signalled", tile=TILES[0], group_rows=(third, third), comm_sms=8))
    return Case(
        M_shard=M_shard, N_local=draw.randint(1, columns), K_local=draw.randint(1, 30),
        dtype=draw.choice(DTYPES), plan=draw.choice(plans), **common,
    )  # fmt: skip


def on_hopper(device: str) -> bool:
    """Whether `hopper` must be among the kinds."""
    return device == "cuda" and torch.cuda.get_device_capability()[0] == 9


def _hopper_case(
    piece: str, draw: random.Random, world_size: int, common: dict, small: bool
) -> Case:
    gathers = piece in GATHERS
    a_chunk_each = K_TILES_MIN * (world_size - 1) * hopper_config.TILE.block_k
    Ks = [64, 72, 520, 2056] if gathers else [64, 520, *range(a_chunk_each, a_chunk_each + 24, 8)]
    most = 1 if small else draw.choice([1, 1, 1, 3])
    case = Case(
        M_shard=draw.choice([128, 256, 384] if gathers else [1, 37, 128, 200, 333]) * most,
        N_local=draw.choice([128, 136, 520, 1000]) * most, K_local=draw.choice(Ks),
        dtype=draw.choice([torch.bfloat16, torch.float16]), **common,
    )  # fmt: skip
    problem = Problem.of_operands(
        Pattern(case.pattern), case.M_shard * (1 if gathers else world_size), case.N_local,
        case.K_local, str(case.dtype).removeprefix("torch."), world_size, case.layout, "cuda",
    )  # fmt: skip
    if reason := hopper.supports(problem):
        raise RuntimeError(
            f"a Hopper GPU, but `hopper` cannot run {problem}: {reason}; --portable leaves it out"
        )
    plan = draw.choice([hopper.default_plan(problem), *hopper.candidates(problem)])
    if not gathers:
        ways = ["sm", "copy_engine", *["engines"] * (case.pattern == "gemm_ar")]
        plan = replace(plan, transport=draw.choice(ways))
    rows = draw.choice([0, plan.comm_rows, 64, 1 + case.M_shard // 3])
    return replace(case, plan=replace(plan, comm_rows=rows))


class Operands:
    """This rank's operands of a kind, and its results; all sums of them are exact."""

    def __init__(self, kind: Kind, group: ProcessGroup, device: torch.device) -> None:
        self.kind, self.group, case = kind, group, kind.case
        given, rank = cases.operands(case, group.size(), device), group.rank()
        self.x, self.w, self.y = given.x[rank], given.w[rank], given.expected[rank]
        self.bias = given.bias[rank] if given.bias else None
        made = torch.Generator(device).manual_seed(case.seed)
        of_ranks = given.x
        if kind.piece == "column backward":
            shape = case.M_shard, case.N_local
            of_ranks = [small_integers(shape, case.dtype, made) for _ in given.x]
        self.rows, self.gathered = of_ranks[rank], torch.cat(of_ranks)

    def call(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Make the call; pairs of what it gives and what it must give, to be compared at once."""
        given = {"layout": self.kind.case.layout, "plan": self.kind.case.plan}
        if self.kind.piece == "gemm_rs":
            yield pieces.start_gemm_rs(self.x, self.w, self.group, **given).finish(), self.y
        elif self.kind.piece == "column backward":
            yield from self._column_backward(given["plan"])
        else:
            borrowed: list[Tensor] = []
            if self.kind.piece == "row backward":
                given["consume"] = lambda rows: borrowed.append(rows.clone())
            yield ops.run_ag_gemm(self.x, self.w, self.bias, self.group, **given), self.y
            for rows in borrowed:
                yield rows, self.gathered

    def _column_backward(self, plan: Plan | None) -> Iterator[tuple[Tensor, Tensor]]:
        """`pieces.start_gather_and_gemm_rs` by the plan of the kind: x gathered, dy scattered."""
        decision = decide(Pattern.GEMM_RS, self.x, self.w, None, self.group, "nn", plan)
        decision.count()
        space = decision.workspace
        build, gather_plan = registry.gather_beside(decision.plan)
        gather = calls.start_gather(build, self.rows, gather_plan, space)
        program = decision.program(self.x, self.w, None, True, None)
        scatter = calls.InFlight(program, self.x, self.w, None)
        rows = gather.complete()
        torch.mm(self.x.t(), rows)  # wgrad
        yield rows, self.gathered
        gather.close()
        yield scatter.finish(), self.y
