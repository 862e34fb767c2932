"""The two operations on FP8 operands with a scale each: exact on integers, within one rounding on
random numbers, and every misuse refused on every rank.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import ON_HOPPER, assert_refused
from closeness import assert_exact
from ranks import DEVICE, FUSED, here, on_device_ranks
from torch import Tensor

import flux_megatron
from flux_megatron import errors, ops, pieces, scaling, settings
from flux_megatron.lab import reference
from flux_megatron.overlap import library_gemm, operands, registry
from flux_megatron.problem import Pattern, Plan, Problem, Tile
from flux_megatron.scaling import Scaling
from flux_megatron.symm.workspaces import workspace

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
WIRE = {"FLUX_MEGATRON_FP8_WIRE": "1"}
OUT = [torch.bfloat16, torch.float16, torch.float32]
PLANS = [
    Plan("sequential"),
    Plan("fused", tile=Tile(16, 16, 16)),
    Plan("fused", comm_rows=7, tile=Tile(16, 64, 32)),
    Plan("pipelined", comm_rows=7),
]
PATTERNS = ["ag_gemm", "gemm_rs"]
SHAPES = [(16, 16, 16), (13, 48, 32), (33, 32, 80)]  # rows of a shard, N and K of a rank


def fp8(generator: torch.Generator, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-2, 3, (rows, columns), generator=generator).float().to(dtype)


def spread(generator: torch.Generator, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Of all magnitudes, numbers below the least normal one and the largest among them."""
    finite = torch.randint(0, 256, (rows, columns), generator=generator).to(torch.uint8).view(dtype)
    return torch.where(finite.float().isfinite(), finite.float(), 1.0).to(dtype)


class Layer:
    """Shards of all ranks, the same on every rank that asks."""

    def __init__(
        self, pattern: str, sizes: tuple[int, int, int], x_dtype: torch.dtype,
        out_dtype: torch.dtype, world_size: int = 2, drawn: Callable = fp8, bias: bool = False,
        blockwise: bool = False,
    ) -> None:  # fmt: skip
        made, gathers = torch.Generator().manual_seed(sum(sizes)), pattern == "ag_gemm"
        M_shard, N, K = sizes
        rows, ranks = M_shard * (1 if gathers else world_size), range(world_size)
        self.pattern, self.out_dtype = pattern, out_dtype
        self.x = [drawn(made, rows, K, x_dtype) for _ in ranks]
        self.w = [drawn(made, N, K, E4M3) for _ in ranks]
        # powers of two, which round nothing, and other ones of each rank
        self.x_scale = [torch.tensor(0.5 if gathers else 2.0**-r) for r in ranks]
        self.w_scale = [torch.tensor([2.0 ** (r + 1)]) for r in ranks]
        if blockwise:
            of_x, of_w = scaling.block_shapes(rows, N, K)
            self.x_scale = [fp8(made, *of_x, torch.float32).exp2() for _ in ranks]
            self.w_scale = [fp8(made, *of_w, torch.float32).exp2() for _ in ranks]
        self.bias = None
        if bias:
            self.bias = [fp8(made, 1, N, E4M3)[0].to(out_dtype) * 3 for _ in ranks]

    def expected(self) -> list[Tensor]:
        options = {"x_scale": self.x_scale, "w_scale": self.w_scale, "out_dtype": self.out_dtype}
        options |= {"bias": self.bias} if self.bias else {}
        return reference.PATTERNS[Pattern(self.pattern)](self.x, self.w, **options)

    def call(self, plan: Plan | None, split_accumulator: bool = False) -> Tensor:
        group = dist.group.WORLD
        r = group.rank()
        bias = self.bias and self.bias[r].to(DEVICE)
        run = ops.all_gather_gemm if self.pattern == "ag_gemm" else ops.gemm_reduce_scatter
        return run(
            self.x[r].to(DEVICE), self.w[r].to(DEVICE), group, plan=plan,
            x_scale=self.x_scale[r].to(DEVICE), w_scale=self.w_scale[r].to(DEVICE),
            out_dtype=self.out_dtype, split_accumulator=split_accumulator,
            **({"bias": bias} if bias is not None else {}),
        )  # fmt: skip

    def check(self, plan: Plan | None, split_accumulator: bool = False) -> None:
        got, expected = self.call(plan, split_accumulator), self.expected()[dist.get_rank()]
        assert_exact(got, expected, f"{self.pattern} {list(self.x[0].shape)} {plan}")


def assert_counted(**counts: int) -> None:
    """How many calls of each operation a strategy has run."""
    expected = {(p, strategy): count for p in PATTERNS for strategy, count in counts.items()}
    assert flux_megatron.report().calls == expected


@pytest.mark.parametrize("world_size", [2, 3])
@on_device_ranks("world_size")
def test_small_integers_are_exact(rank):
    kinds = itertools.product(PATTERNS, SHAPES, PLANS)
    for number, (pattern, sizes, plan) in enumerate(kinds):
        x_dtype, out_dtype = (E4M3, E5M2)[number % 2], OUT[(number + number // 3) % 3]
        bias = pattern == "ag_gemm" and number % 2 == 0
        layer = Layer(pattern, sizes, x_dtype, out_dtype, dist.get_world_size(), bias=bias)
        for _ in range(6):  # one program, to which each call brings scales of its own
            layer.x_scale = [2 * one for one in layer.x_scale]
            layer.check(plan, number % 4 == 0)
    assert_counted(sequential=18, fused=36, pipelined=18)


def e4m3_sums(layer: Layer) -> None:
    """Leave partial sums that four bits hold, of another size in each 64 rows of x and of w."""
    for of_ranks in (layer.x, layer.w):
        for rank, matrix in enumerate(of_ranks):
            powers = (torch.arange(len(matrix)) // 64 % 5).float().exp2()
            of_ranks[rank] = (matrix.float() * powers[:, None]).to(matrix.dtype)
            of_ranks[rank].view(torch.uint8)[:, 2:] = 0


@pytest.mark.skipif(not ON_HOPPER, reason="`hopper` needs GPUs of compute capability 9")
@pytest.mark.parametrize("transport", ["copy_engine", "sm"])
@on_device_ranks(2, environment=WIRE)
def test_partial_sums_travel_in_e4m3(rank, transport):
    for sizes, split in (((384, 768, 1024), False), ((130, 528, 2048), True)):
        layer = Layer("gemm_rs", sizes, E4M3, OUT[0])
        problem = Problem.of_operands(
            Pattern.GEMM_RS, len(layer.x[0]), *layer.w[0].shape, "float8_e4m3fn", 2, "nt", "cuda",
            out_dtype="bfloat16", split_accumulator=split, wire=True,
        )  # fmt: skip
        plan = replace(registry.strategy(problem, "hopper").default_plan(problem), comm_rows=64)
        plan = replace(plan, transport=transport)
        rounded = layer.call(plan, split).float()
        error = (rounded - layer.expected()[rank].float().to(DEVICE)).abs()
        largest = layer.expected()[rank].abs().max()
        assert 0 < error.max() <= largest / 16, "sums of more than four bits are rounded"
        e4m3_sums(layer)
        for _ in range(6):
            layer.x_scale = [2 * one for one in layer.x_scale]
            layer.check(plan, split)
        layer.x = [torch.zeros_like(x.float()).to(x.dtype) for x in layer.x]
        layer.check(plan, split)  # the largest of each tile is 0
        layer.x_scale = [torch.tensor([torch.inf])] * 2
        assert layer.call(plan, split).isnan().all()


@on_device_ranks(2, environment=WIRE)
def test_another_strategy_says_once_that_it_sends_no_e4m3(rank):
    layer = Layer("gemm_rs", SHAPES[0], E4M3, OUT[0])
    with pytest.warns(UserWarning, match="FP8_WIRE=1: fused sends no partial sums") as said:
        layer.check(PLANS[1])
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.check(PLANS[1])


@on_device_ranks(2)
def test_ranks_that_differ_in_the_wire_are_refused(rank):
    """And in their results."""
    with pytest.raises(errors.ProblemMismatch, match=r"to bfloat16.*to float16"):
        Layer("gemm_rs", SHAPES[0], E4M3, OUT[rank]).call(None)
    os.environ["FLUX_MEGATRON_FP8_WIRE"] = str(rank)
    settings.reload()
    with pytest.raises(errors.ProblemMismatch, match="e4m3 on the wire"):
        Layer("gemm_rs", SHAPES[0], E4M3, OUT[0]).call(PLANS[1])


BLOCKWISE_PLANS = [
    Plan("sequential"),
    Plan("pipelined"),
    Plan("pipelined", comm_rows=8),
    Plan("pipelined", gemms=1),
    Plan("pipelined", gemms=2),
]
# K of less than a block, of some, and of some and part of one; N too
BLOCKWISE_SHAPES = [(5, 16, 48), (13, 144, 256), (16, 32, 272)]
if DEVICE == "cuda":  # whose library takes no such rows, and not in all versions such K
    BLOCKWISE_SHAPES = [(8, 16, 512), (28, 144, 1024)]


@pytest.mark.parametrize("world_size", [2, 3])
@on_device_ranks("world_size")
def test_blockwise_scales_are_exact(rank):
    """Each shard of x has its own, each row and 128 of K one; w one for 128 x 128."""
    kinds = itertools.product(PATTERNS, BLOCKWISE_SHAPES, BLOCKWISE_PLANS)
    for number, (pattern, sizes, plan) in enumerate(kinds):
        x_dtype, bias = (E4M3, E5M2)[number % 2], pattern == "ag_gemm" and number % 2 == 0
        ranks = dist.get_world_size()
        layer = Layer(pattern, sizes, x_dtype, OUT[2], ranks, bias=bias, blockwise=True)
        for step in range(3):  # one program, to which each call brings scales of its own
            layer.x_scale = [one.roll(step, 1) for one in layer.x_scale]
            layer.check(plan)
    steps = 3 * len(BLOCKWISE_SHAPES)
    assert_counted(sequential=steps, pipelined=4 * steps)


def as_torch_takes_it(
    x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, *, bias: Tensor | None,
    out_dtype: torch.dtype, use_fast_accum: bool, out: Tensor | None,
) -> Tensor:  # fmt: skip
    """`torch._scaled_mm` on CUDA, which refuses scales with other strides."""
    rows, (K, N) = len(x), w.shape
    assert (of_x.shape, of_x.stride()) == ((rows, K // 128), (1, rows))
    assert (of_w.shape, of_w.stride()) == ((K // 128, -(-N // 128)), (1, K // 128))
    assert not use_fast_accum
    assert w.stride() == (1, K)
    given = Scaling(of_x.t(), of_w.t(), out_dtype, True, True)
    real_x, real_w = scaling.dequantized(x, w.t(), given)
    y = real_x @ real_w.t()
    y = (y if bias is None else y + bias.float()).to(out_dtype)
    return y if out is None else out.copy_(y)


@pytest.mark.skipif(DEVICE != "cpu", reason="stands in for CUDA")
@on_device_ranks(2)
def test_the_library_gets_scales_without_gaps(rank):
    """One GEMM; one a shard, or a chunk of it; and bias is rounded with the sum."""
    taken = mock.Mock(side_effect=as_torch_takes_it)
    in_library = mock.patch.object(library_gemm, "_in_library", return_value=True)
    with mock.patch.object(torch, "_scaled_mm", taken), in_library:
        for pattern, plan in itertools.product(PATTERNS, BLOCKWISE_PLANS):
            bias = pattern == "ag_gemm"
            Layer(pattern, (12, 144, 512), E5M2, OUT[0], bias=bias, blockwise=True).check(plan)
    gathering, reducing = 1 + 2 + 2 + 1 + 2, 1 + 2 + 4 + 1 + 1
    assert taken.call_count == gathering + reducing


@on_device_ranks(2)
def test_all_values_of_fp8_are_multiplied(rank):
    for pattern, x_dtype, plan in itertools.product(PATTERNS, (E4M3, E5M2), PLANS):
        layer = Layer(pattern, (33, 32, 96), x_dtype, torch.float32, drawn=spread)
        expected, got = layer.expected()[rank], layer.call(plan)
        layer.x, layer.w = [[one.double().abs() for one in part] for part in (layer.x, layer.w)]
        layer.out_dtype = torch.float64
        largest = layer.expected()[rank]  # sums of magnitudes, in whose last bits orders differ
        # tensor cores line products up by the largest of an MMA, and keep 13 bits below it
        step = 2.0**-13 if DEVICE == "cuda" else 2.0**-24
        assert ((got.cpu() - expected).abs() <= 96 * step * largest).all(), f"{pattern} {plan}"


@on_device_ranks(2)
def test_one_shape_has_results_of_every_dtype(rank):
    """What is kept for a shape, such as a launch, is not that of another result."""
    for pattern, plan, out_dtype in itertools.product(PATTERNS, PLANS, OUT):
        Layer(pattern, (16, 16, 16), E4M3, out_dtype).check(plan)
    for pattern, blockwise in itertools.product(PATTERNS, (False, True)):  # all with this sum
        Layer(pattern, (16, 16, 512), E4M3, OUT[2], blockwise=blockwise).check(PLANS[-1], True)


@on_device_ranks(2)
def test_wgrad_borrows_the_gathered_bytes(rank):
    layer = Layer("ag_gemm", (16, 16, 16), E5M2, torch.bfloat16)
    for plan in PLANS:
        seen: list[Tensor] = []
        scales = (one[rank].to(DEVICE) for one in (layer.x_scale, layer.w_scale))
        ops.run_ag_gemm(
            layer.x[rank].to(DEVICE), layer.w[rank].to(DEVICE), None, dist.group.WORLD, plan=plan,
            scaling=Scaling(*scales, torch.bfloat16, False),
            consume=lambda rows, seen=seen: seen.append(rows.clone()),
        )  # fmt: skip
        assert_exact(seen[0].float(), torch.cat(layer.x).float())
        assert seen[0].dtype is E5M2


@on_device_ranks(2, environment=FUSED)
def test_torch_compile_keeps_the_scales(rank):
    for pattern in PATTERNS:
        layer = Layer(pattern, (16, 16, 16), E4M3, torch.float16)
        got = torch.compile(layer.call, backend="eager", fullgraph=True)(None)
        assert_exact(got, layer.expected()[rank])


@on_device_ranks(1)
def test_a_rank_that_lacks_memory_for_dense_scales_asks_the_others(rank):
    space, one = workspace(dist.group.WORLD, here()), torch.ones(1, 16, device=DEVICE)
    lacks = mock.patch.object(operands, "memory", side_effect=torch.OutOfMemoryError)
    with lacks, pytest.raises(torch.OutOfMemoryError):
        operands.dense(Scaling(one, one, torch.bfloat16, True, True), space)
    assert space.failed_alone
    space.failed_alone = False


@on_device_ranks(2)
def test_every_rank_refuses_misuse_and_the_group_still_works(rank):
    for pattern in PATTERNS:  # the shapes of most bad calls: what was checked is known by now
        Layer(pattern, (16 if pattern == "ag_gemm" else 8, 16, 32), E4M3, OUT[0]).call(None)
    one = torch.ones(1, device=DEVICE)
    x, w = (torch.ones(16, 32, device=DEVICE).to(E4M3) for _ in range(2))
    scales = {"x_scale": one, "w_scale": one}
    gradient = w.to(E5M2)
    x_blocks, block = torch.ones(1, 16, device=DEVICE), torch.ones(1, 4, device=DEVICE)
    both = [ops.all_gather_gemm, ops.gemm_reduce_scatter]
    if DEVICE == "cpu":  # where the library has such a GEMM of any sizes
        for operation in both:
            operation(x, w, dist.group.WORLD, x_scale=x_blocks, w_scale=block)
    assert_refused([
        (both, (torch.cat([x.float()] * 2).to(E4M3), w), {"x_scale": x_blocks, "w_scale": block},
         "x_scale [1, 16] float32 on", "a float32 tensor [1, 32] on"),  # stale
        (both, (x, w), {}, "without scales", "x_scale and w_scale"),
        (both, (gradient, w), {}, "without scales"),
        (both, (x, w), {"x_scale": one}, "w_scale None given"),
        (both, (x, w), {"w_scale": one}, "x_scale None given"),
        (both, (x, w), {"out_dtype": torch.float32}, "x_scale None given"),
        (both, (x.bfloat16(), w.bfloat16()), scales, "x bfloat16 and w"),
        (both, (x, gradient), scales, "w float8_e5m2 given", "w float8_e4m3fn"),
        (both, (x, w.bfloat16()), scales, "w bfloat16 given"),
        (both, (x, w), scales | {"x_scale": torch.ones(16, device=DEVICE)},  # a scale a row
         "x_scale [16] float32", "of one element on"),
        (both, (x, w), scales | {"w_scale": one.bfloat16()}, "w_scale [1] bfloat16"),
        (both, (x, w), scales | {"w_scale": one.to("meta")}, "w_scale [1] float32 on meta given"),
        (both, (x, w), scales | {"w_scale": 1.0}, "w_scale 1.0 given"),
        (both, (x, w), {"x_scale": one[0], "w_scale": one.to_sparse()},
         "w_scale of the type Tensor and the layout torch.sparse_coo given"),
        (both, (x, w), scales | {"out_dtype": E4M3}, "out_dtype torch.float8"),
        (both, (x, w.t().contiguous()[:, :16]), scales | {"layout": "nn"},
         "layout 'nn' given", "pass the cached transpose"),
        (both, (x[:, :24].clone(), w[:, :24].clone()), scales, "N 16 and K 24", "multiples of 16"),
        (both, (x, w[:8].clone()), scales, "N 8 and K 32", "multiples of 16"),
        (both, (x, w), {"x_scale": x_blocks.new_ones(1, 20), "w_scale": block},
         "x_scale [1, 20] float32 on", "a float32 tensor [1, 16] on"),
        (both, (x, w), {"x_scale": x_blocks, "w_scale": block.new_ones(1, 2)},
         "w_scale [1, 2] float32 on", "a float32 tensor [1, 4] on"),
        (both, (x, w), {"x_scale": x_blocks, "w_scale": one},
         "x_scale [1, 16] float32", "of one element on"),
        (both, (x, w), scales | {"plan": Plan("signalled")},
         "cannot run", "dtype float8_e4m3fn is none of"),
        (both, (x, w), {"x_scale": x_blocks, "w_scale": block, "plan": Plan("fused")},
         "cannot run", "our kernels add up no products"),
        (both[:1], (x, w), scales | {"bias": torch.ones(16, device=DEVICE)},
         "bias [16] float32", "[16] torch.bfloat16 expected"),
        ([ops.gemm_all_reduce, pieces.start_gemm_rs], (x, w), {}, "without scales"),
    ])  # fmt: skip
    Layer("gemm_rs", (16, 16, 16), E4M3, torch.bfloat16).check(PLANS[1])


@pytest.mark.parametrize("blockwise", [False, True])
def test_strategies_without_fp8_say_so(blockwise):
    can = {"pipelined", "sequential"} | ({"fused"} if not blockwise else set())
    for name in ("pipelined", "signalled", "low_latency", "fused", "sequential"):
        for pattern in PATTERNS:
            problem = Problem(
                Pattern(pattern), 32, 32, 1024, "float8_e4m3fn", 2, device=DEVICE,
                out_dtype="bfloat16", blockwise=blockwise,
            )  # fmt: skip
            refusal = registry.refusal(problem, name, None)
            assert (refusal is None) == (name in can), f"{name}: {refusal}"
