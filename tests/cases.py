"""Calls of the operations: operands for all ranks, and what each rank must get."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from closeness import assert_exact, assert_sums_exact, small_integers
from ranks import DEVICE
from torch import Tensor
from torch.distributed import ProcessGroup

from flux_megatron import ops
from flux_megatron.kernels.hopper.config import DEEP, LOW, TILES
from flux_megatron.kernels.sizes import tiles_of_shard
from flux_megatron.lab import reference
from flux_megatron.patterns import Pattern
from flux_megatron.problem import Plan, Tile, own_fields
from flux_megatron.symm.workspace import Workspace


@dataclass(frozen=True)
class Case:
    """One call: sizes on each rank, so that any of them may be ragged at any world size."""

    pattern: str
    M_shard: int
    N_local: int
    K_local: int
    dtype: torch.dtype = torch.float32
    layout: str = "nt"
    bias: bool = False
    plan: Plan | None = None
    seed: int = 0
    kept: float = 1.0  # of the operands' elements, so that long sums stay exact
    lacking: int = 0  # rows of the last rank, in GEMM+AR


# Where `hopper` must run: tests of it fail there, and do not skip, if its kernels cannot be had.
ON_HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability()[0] == 9


def hopper_cases(pattern: str, world_size: int) -> list[Case]:
    """Calls of `hopper` with every transport, tile and cut that its kernels know."""
    K = 0 if pattern == "ag_gemm" else 8 * 64 * (world_size - 1)  # the least that RS takes
    shapes = [(128, 136, K + 64), (256, 520, K + 72), (384, 1000, K + 1024)]
    if pattern == "gemm_rs":
        shapes += [(1, 8, K), (37, 128, K + 8), (333, 264, K + 520)]
    narrow = Tile(128, 128, 64, group_m=16, num_stages=5, tma=True)
    wide = Tile(128, 256, 64, group_m=8, num_stages=3, tma=True)
    plans = [
        Plan("hopper", rows, tile, transport=transport)
        for rows, tile, transport in (
            (0, wide, "copy_engine"), (64, narrow, "copy_engine"), (40, wide, "sm"),
            (0, narrow, "sm"), (24, wide, "copy_engine"),
        )
    ]  # fmt: skip
    if pattern == "gemm_ar":
        plans += [Plan("hopper", 64, wide, transport="engines")]
        plans += [Plan("hopper", 24, narrow, transport="engines")]
    dtypes = itertools.cycle([torch.bfloat16, torch.float16])
    more = _other_tiles(K) if pattern == "ag_gemm" else []
    made = [
        Case(pattern, *shape, dtype=dtype, layout=layout, plan=plan, seed=seed, kept=0.15)
        for seed, (shape, plan, layout, dtype) in enumerate(
            (*both, dtype)
            for both, dtype in zip(
                itertools.product(shapes, plans, ("nt", "nn")), dtypes, strict=False
            )
        )
    ]
    return more + [one for one in made if not _refused(one)]


def _refused(case: Case) -> bool:
    """Engines push no sums of a shard of one tile."""
    tile = case.plan.tile
    return case.plan.transport == "engines" and tiles_of_shard(case.M_shard, case.N_local, tile) < 2


def _other_tiles(K: int) -> list[Case]:
    """AG+GEMM with each tile, of ragged shards, and of rows that come in
    parts of K; in one layout each, because each is a kernel to compile.
    """
    rows = itertools.cycle([64, 200, 333, 70])
    in_parts = [
        Case(
            "ag_gemm", M_shard, 520, K + 1024, dtype=torch.bfloat16, kept=0.15, layout=layout,
            plan=Plan("hopper", tile=tile, k_parts=splits),
        )
        for tile, M_shard, layout, splits in ((DEEP, 200, "nt", 4), (LOW[1], 64, "nn", 3))
    ]  # fmt: skip
    return in_parts + [
        Case(
            "ag_gemm", max(tile.block_m, M_shard), 520, K + 1024, dtype=torch.bfloat16, kept=0.15,
            layout=layout, bias=layout == "nn", plan=Plan("hopper", comm_rows, tile),
        )
        for tile, M_shard, layout, comm_rows in zip(
            TILES, rows, itertools.cycle(["nn", "nt", "nt"]), itertools.cycle([0, 64]), strict=False
        )
    ]  # fmt: skip


@dataclass(frozen=True)
class Operands:
    """Entry r of each list belongs to rank r; so does entry r of `expected`."""

    x: list[Tensor]
    w: list[Tensor]
    bias: list[Tensor] | None
    expected: list[Tensor]


def operands(case: Case, world_size: int, device: torch.device | str = "cpu") -> Operands:
    """Small integers, the same on every rank that asks; asserts that all sums of them are exact."""
    generator = torch.Generator(device).manual_seed(case.seed)

    def shards(*shape: int) -> list[Tensor]:
        return [
            small_integers(shape, case.dtype, generator, kept=case.kept) for _ in range(world_size)
        ]

    gathers = case.pattern == "ag_gemm"
    x = shards(case.M_shard * (1 if gathers else world_size) - case.lacking, case.K_local)
    N, K = case.N_local, case.K_local
    w = shards(*((N, K) if case.layout == "nt" else (K, N)))
    bias = shards(N) if case.bias else None
    columns = [shard.t() if case.layout == "nt" else shard for shard in w]
    if gathers:
        assert_sums_exact(torch.cat(x), torch.cat(columns, 1), extra=1)
    else:
        assert_sums_exact(torch.cat(x, 1), torch.cat(columns))
    return Operands(x, w, bias, expected(case, x, w, bias))


def expected(
    case: Case, x: list[Tensor], w: list[Tensor], bias: list[Tensor] | None
) -> list[Tensor]:
    """What the reference gives each rank."""
    options = {"bias": bias} if bias else {}
    return reference.PATTERNS[Pattern(case.pattern)](x, w, case.layout, **options)


def call(case: Case, given: Operands, group: ProcessGroup) -> Tensor:
    """The public operation on this rank's shards."""
    r = group.rank()
    x, w = given.x[r].to(DEVICE), given.w[r].to(DEVICE)
    bias = {"bias": given.bias[r].to(DEVICE)} if given.bias else {}
    operation = ops.OPERATIONS[Pattern(case.pattern)]
    return operation(x, w, group, layout=case.layout, plan=case.plan, **bias)


def plan_of(strategy: str, **numbers: object) -> Plan:
    """With those of the numbers that the strategy has."""
    return Plan(**own_fields({"strategy": strategy, **numbers}))


def check(case: Case, group: ProcessGroup | None = None) -> None:
    """Call and compare, with no tolerance."""
    group = group or dist.group.WORLD
    given = operands(case, group.size())
    assert_exact(call(case, given, group), given.expected[group.rank()], str(case))


def check_all(cases: Iterable[Case]) -> None:
    """All of them are compared at the end: later calls leave results alone."""
    results, rank = [], dist.get_rank()
    for case in cases:
        given = operands(case, dist.get_world_size())
        results.append((call(case, given, dist.group.WORLD), given.expected[rank], str(case)))
    for result in results:
        assert_exact(*result)


def fail_in_a_call(
    space: Workspace, error: Exception, before: Callable[[], object] = lambda: None
) -> None:
    """In its middle: the other ranks cannot go on."""
    with space.guard():
        space.begin("gather", 100)
        before()
        raise error


def assert_refused(rows: list[tuple]) -> None:
    """Rows of operations of the world, what each is given, and words of its message."""
    for operations, given, options, *words in rows:
        for operation in operations:
            with pytest.raises(ValueError, match=r"given|cannot run") as caught:
                operation(*given, group=dist.group.WORLD, **options)
            for word in words:
                assert word in str(caught.value), f"{operation}: {word!r} not in {caught.value}"


def forget_programs(space: Workspace) -> None:
    """A call of known shapes builds its program anew."""
    space.programs.clear()
    for decision in space.checked.values():
        decision._programs.clear()
