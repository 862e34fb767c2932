"""Few rows in one kernel: exact, the same bits on every rank, bounded, chosen."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from cases import ON_HOPPER, Case, check_all, operands
from closeness import assert_exact, small_integers
from ranks import DEVICE, be_late, on_device, on_device_ranks
from test_gemm_ar import sum_of_unequal

import flux_megatron
from flux_megatron import errors, ops
from flux_megatron.kernels.few_rows.gemv_ar import sum_columns
from flux_megatron.kernels.hopper.config import NARROW
from flux_megatron.kernels.sizes import cdiv, next_power_of_2
from flux_megatron.lab import reference
from flux_megatron.overlap import low_latency, low_latency_plans, registry
from flux_megatron.problem import Pattern, Plan, Problem, Tile
from flux_megatron.tuning import plan_table, tuner

DTYPES = ["float32", "bfloat16", "float16"]
SMALL = Tile(16, 16, 16, num_warps=4, num_stages=2)
PLANS = {
    "one shot": Plan("low_latency", tile=SMALL),
    "two phases": Plan("low_latency", tile=SMALL, two_phase=True),
    "by TMA": Plan("low_latency", tile=replace(SMALL, tma=True)),
    "parts of K": Plan("low_latency", tile=SMALL, k_parts=2),
    "parts by TMA": Plan("low_latency", tile=replace(SMALL, tma=True), k_parts=3, two_phase=True),
}


WORLDS = [  # each dtype and plan compiles kernels of its own
    *zip(itertools.repeat(1), PLANS, itertools.cycle(DTYPES), strict=False),
    *itertools.product([2], PLANS, DTYPES[:2]), (2, "one shot", "float16"),
    (3, "one shot", "bfloat16"), (4, "one shot", "float32"), (4, "parts by TMA", "bfloat16"),
    (8, "two phases", "bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize(("world_size", "plan", "dtype"), WORLDS)
@on_device_ranks("world_size")
def test_exact(rank, plan, dtype):
    """AG+GEMM and GEMM+RS, in turns with GEMM+AR: their words lie in the same memory."""
    R, made = dist.get_world_size(), []
    for layout in ("nt", "nn"):
        for M_shard, N, K in ((1, 33, 20), (3, 16, 7), (8, 40, 48), (128 // R, 1, 33)):
            given = {"dtype": getattr(torch, dtype), "layout": layout, "plan": PLANS[plan]}
            made += [Case(pattern, M_shard, N, K, **given) for pattern in Pattern]
            made.append(Case("gemm_ar", 1, N, K, **given, lacking=R - 1))
    check_all(made)


@pytest.mark.parametrize("plan", PLANS)
@on_device_ranks(3)
def test_every_rank_adds_in_rank_order(rank, plan):
    """Partials that no two orders of addition sum up to the same bits."""
    made = torch.Generator().manual_seed(3)
    xs = [torch.rand(4, 1, generator=made) for _ in range(3)]
    ws = [10.0 ** (3 * (r % 2)) * torch.rand(64, 1, generator=made) for r in range(3)]
    mine = xs[rank].to(DEVICE), ws[rank].to(DEVICE)
    y = ops.gemm_all_reduce(*mine, dist.group.WORLD, plan=PLANS[plan])
    assert_exact(y, reference.gemm_all_reduce(xs, ws)[0], "in rank order")
    own_first = sum((xs[r] @ ws[r].t() for r in (1, 2, 0)), torch.zeros(4, 64))
    assert not torch.equal(y.cpu(), own_first), "these operands do not tell the orders apart"


def test_sums_are_rounded_once():
    on_device(sum_of_unequal, 4, [*PLANS.values()])


@on_device_ranks(2)
def test_parts_of_k_are_not_rounded(rank):
    """Parts of K that are 257 and 1: their sum is 258 if neither is rounded to bf16."""
    x, w = (torch.zeros(rows, 32, dtype=torch.bfloat16, device=DEVICE) for rows in (2, 16))
    w += 1
    if rank == 0:
        x[:, 0], x[:, 1], x[:, 16] = 256, 1, 1
    for operation in (ops.gemm_all_reduce, ops.all_gather_gemm):
        y = operation(x, w, dist.group.WORLD, plan=PLANS["parts of K"])[:2]
        assert_exact(y.float(), torch.full((2, 16), 258.0), operation.__name__)


@pytest.mark.parametrize("pattern", Pattern)
@on_device_ranks(2, environment={"FLUX_MEGATRON_TIMEOUT_S": "2"}, fresh=True)
def test_words_that_do_not_come_are_reported(rank, pattern):
    """Rank 1 makes one call less."""
    x, w = torch.ones(2, 40, device=DEVICE), torch.ones(40, 40, device=DEVICE)
    call = partial(ops.OPERATIONS[pattern], x, w, dist.group.WORLD, plan=PLANS["one shot"])
    call()
    dist.barrier()
    said = "rank 0 of group .* for words of rank 1: epoch 2 expected, 0 seen"
    if rank == 0:
        with pytest.raises(errors.SignalTimeout, match=said):  # noqa: PT012
            call()
            flux_megatron.synchronize()


@on_device_ranks(2, environment={"FLUX_MEGATRON_STRATEGY": "low_latency"})
def test_more_rows_are_refused_or_fall_back_with_the_reason(rank):
    group = dist.group.WORLD
    x, w = torch.ones(129, 4, device=DEVICE), torch.ones(3, 4, device=DEVICE)
    with pytest.raises(ValueError, match="129 rows given, 128 at most expected"):
        ops.gemm_all_reduce(x, w, group, plan=PLANS["one shot"])
    with pytest.raises(ValueError, match="gemv_all_reduce: 129 rows given, 128 at most expected"):
        ops.gemv_all_reduce(x, w, group)
    assert_exact(ops.gemm_all_reduce(x, w, group), torch.full((129, 3), 8.0))
    reasons = [reason for _, reason in flux_megatron.report().fallbacks]
    assert reasons == ["129 rows given, 128 at most expected"]


@pytest.mark.parametrize("layout", ["nt", "nn"])
@on_device_ranks(2)
def test_the_public_operation_is_differentiable(rank, layout):
    """Gradients beside those of one process that has all of K; then compiled."""
    group = dist.group.WORLD
    flux_megatron.reset_report()
    given = operands(Case("gemm_ar", 3, 20, 8, layout=layout), group.size())
    truth = given.expected[rank]
    x, w = (part[rank].to(DEVICE).requires_grad_() for part in (given.x, given.w))
    dy = torch.arange(120.0, device=DEVICE).reshape(6, 20) % 5
    y = flux_megatron.gemv_all_reduce(x, w, group, layout=layout)
    assert_exact(y, truth)
    y.backward(dy)
    whole = [part[rank].detach().clone().requires_grad_() for part in (given.x, given.w)]
    reference.matmul(*whole, layout).backward(dy.cpu())
    assert_exact(x.grad, whole[0].grad, "dx")
    assert_exact(w.grad, whole[1].grad, "dw")
    compiled = torch.compile(ops.gemv_all_reduce, backend="eager", fullgraph=True)
    assert_exact(compiled(x.detach(), w.detach(), group, layout=layout), truth, "compiled")
    counted = {strategy: count for (_, strategy), count in flux_megatron.report().calls.items()}
    assert counted == {"low_latency": 2}


PROBLEM = Problem(Pattern.GEMM_AR, 16, 8192, 8192, "bfloat16", 2)


def test_few_rows_are_chosen_and_many_ranks_take_two_phases():
    few = PROBLEM
    # a CPU has no kernels for GPUs: as on one that has
    names = ["low_latency"] if DEVICE == "cpu" else [*registry.runnable(few, "auto", None)]
    plans = tuner.candidates(few, names)
    on_gpu = replace(few, device="cuda")
    assert plan_table.ruled(on_gpu, names) == low_latency.default_plan(few)
    assert len([plan for plan in plans if plan.strategy == "low_latency"]) > 1
    assert "129 rows" in (registry.refusal(replace(few, M=129), "low_latency", None) or "")
    for ranks in (2, 4, 8):
        assert low_latency.default_plan(replace(few, world_size=ranks)).two_phase == (ranks == 8)


def test_a_default_tile_is_resident_in_full(monkeypatch):
    """Of 16-bit operands on Hopper: all tiles of up to 64 rows run at once, where memory allows,
    and so do all parts of tiles. And no tile is tried that needs more of it than there is.
    """
    monkeypatch.setattr(low_latency_plans, "_on_hopper", lambda: True)
    for rows, N, layout in itertools.product(
        (1, 16, 32, 33, 64), (640, 1280, 2560, 4096, 5120, 8192, 12288, 16384), ("nt", "nn")
    ):
        problem = replace(PROBLEM, M=rows, N=N, layout=layout)
        default = low_latency.default_plan(problem)
        tile, parts = default.tile, max(1, default.k_parts)
        stage_bytes = 2 * tile.block_k * (next_power_of_2(max(16, rows)) + tile.block_n)
        resident = (227 << 10) // (tile.num_stages * stage_bytes)
        assert parts * cdiv(N, tile.block_n) <= resident * low_latency_plans.SMS, problem
        assert parts == 1 or problem.K_local // parts >= low_latency_plans.LEAST_K
        for other in registry.candidates(replace(problem, M=2 * rows), "low_latency"):
            columns = next_power_of_2(max(16, 2 * rows)) + other.tile.block_n
            assert other.tile.num_stages * 2 * other.tile.block_k * columns <= 227 << 10
        assert layout == "nt" or tile.block_n >= 64


@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 64])
def test_a_sum_fits_in_registers(world_size):
    """A thread loads at most 32 words of all ranks, or those of 16 columns; no word lies in two."""
    for kind, rows in itertools.product(low_latency_plans.TILES, (1, 5, 16, 64, 128)):
        tile, padded = kind.tile, max(16, next_power_of_2(rows))
        columns = sum_columns(tile, padded * world_size, 2)
        words = padded * world_size * columns // 2 / (32 * tile.num_warps)
        assert words <= 32 or columns == 16
        assert columns == tile.block_n or words > 16, "narrower than it must be"
        assert tile.block_n % columns == 0


def test_other_gpus_keep_tiles_of_less_shared_memory(monkeypatch):
    monkeypatch.setattr(low_latency_plans, "_on_hopper", lambda: False)
    for rows in (1, 64, 128):
        tile = low_latency.default_plan(replace(PROBLEM, M=rows)).tile
        assert tile.num_stages * 2 * tile.block_k * (max(16, rows) + tile.block_n) <= 96 << 10
        assert not tile.tma


@pytest.mark.skipif(DEVICE == "cpu", reason="interpreted, a kernel has no warps")
@on_device_ranks(2, limit_s=40)
def test_warps_do_not_part_while_they_wait(rank):
    """Sums of 4 rows: fewer words than a CTA has threads, which hundreds of CTAs wait for."""
    group, made = dist.group.WORLD, torch.Generator().manual_seed(8)
    plan = Plan("low_latency", tile=Tile(16, 32, 64, num_warps=4, num_stages=3))
    for turn in range(60):
        xs = [small_integers((4, 64), torch.bfloat16, made) for _ in range(group.size())]
        ws = [small_integers((8192, 64), torch.bfloat16, made) for _ in range(group.size())]
        x, w = xs[rank].to(DEVICE), ws[rank].to(DEVICE)
        if turn % 2 == rank:
            be_late(0.002)
        y = ops.gemm_reduce_scatter(x, w, group, plan=plan)
        assert_exact(y, reference.gemm_reduce_scatter(xs, ws, "nt")[rank], f"turn {turn}")
    flux_megatron.synchronize()


EXCHANGED = Plan("hopper", tile=NARROW, transport="exchange")
REPLAYED = {**PLANS, "exchanged": EXCHANGED} if ON_HOPPER else PLANS


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need GPUs")
@pytest.mark.parametrize("plan", REPLAYED)
@on_device_ranks(2)
def test_replays_between_eager_calls(rank, plan):
    """Replays and eager calls in turn, in the same two halves; a rank is late now and then."""
    group, (M, N, K_local), plan = dist.group.WORLD, (3, 200, 64), REPLAYED[plan]
    made = torch.Generator().manual_seed(7)
    ws = [small_integers((N, K_local), torch.bfloat16, made) for _ in range(group.size())]
    x, w = torch.zeros(M, K_local, dtype=torch.bfloat16, device=DEVICE), ws[rank].to(DEVICE)
    ops.gemm_all_reduce(x, w, group, plan=plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.gemm_all_reduce(x, w, group, plan=plan)
    for turn in range(50):
        xs = [small_integers((M, K_local), torch.bfloat16, made) for _ in range(group.size())]
        x.copy_(xs[rank])
        if turn % 7 == rank:
            be_late(0.002)
        if turn % 3:
            graph.replay()
        y = captured if turn % 3 else ops.gemm_all_reduce(x, w, group, plan=plan)
        assert_exact(y, reference.gemm_all_reduce(xs, ws)[rank], f"turn {turn}")
    flux_megatron.synchronize()
