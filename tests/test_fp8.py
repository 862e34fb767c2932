"""The two operations on FP8 operands with a scale each: exact on integers, within one rounding on
random numbers, and every misuse refused on every rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from closeness import assert_exact
from ranks import DEVICE, on_device
from torch import Tensor

import flux_megatron
from flux_megatron import errors, ops, scaling
from flux_megatron.lab import reference
from flux_megatron.overlap import registry, sequential
from flux_megatron.problem import Pattern, Plan, Problem, Tile
from flux_megatron.scaling import Scaling

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
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


def powers(generator: torch.Generator, rows: int, columns: int) -> Tensor:
    """Of two, which round nothing."""
    return torch.randint(-2, 3, (rows, columns), generator=generator).float().exp2()


class Layer:
    """Shards of all ranks, the same on every rank that asks."""

    def __init__(
        self, pattern: str, sizes: tuple[int, int, int], x_dtype: torch.dtype,
        out_dtype: torch.dtype, world_size: int, drawn: Callable = fp8, bias: bool = False,
        blockwise: bool = False,
    ) -> None:  # fmt: skip
        made, gathers = torch.Generator().manual_seed(sum(sizes)), pattern == "ag_gemm"
        M_shard, N, K = sizes
        rows, ranks = M_shard * (1 if gathers else world_size), range(world_size)
        self.pattern, self.out_dtype = pattern, out_dtype
        self.x = [drawn(made, rows, K, x_dtype) for _ in ranks]
        self.w = [drawn(made, N, K, E4M3) for _ in ranks]
        # powers of two, which round nothing, and other ones of each rank
        self.x_scale = [torch.tensor([0.5 if gathers else 2.0**-r]) for r in ranks]
        self.w_scale = [torch.tensor([2.0 ** (r + 1)]) for r in ranks]
        if blockwise:
            of_x, of_w = scaling.block_shapes(rows, N, K)
            self.x_scale = [powers(made, *of_x) for _ in ranks]
            self.w_scale = [powers(made, *of_w) for _ in ranks]
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


def exact_calls(rank: int, world_size: int) -> dict[tuple[str, str], int]:
    kinds = itertools.product(PATTERNS, SHAPES, PLANS)
    for number, (pattern, sizes, plan) in enumerate(kinds):
        x_dtype, out_dtype = (E4M3, E5M2)[number % 2], OUT[(number + number // 3) % 3]
        bias = pattern == "ag_gemm" and number % 2 == 0
        layer = Layer(pattern, sizes, x_dtype, out_dtype, world_size, bias=bias)
        expected = layer.expected()[rank]
        for _ in range(6):  # one program, to which each call brings scales of its own
            layer.x_scale = [2 * one for one in layer.x_scale]
            expected = layer.expected()[rank]
            assert_exact(layer.call(plan, number % 4 == 0), expected, f"{pattern} {sizes} {plan}")
    return flux_megatron.report().calls


@pytest.mark.parametrize("world_size", [2, 3])
def test_small_integers_are_exact(world_size):
    counts = {"sequential": 18, "fused": 36, "pipelined": 18}
    for calls in on_device(exact_calls, world_size, world_size):
        assert calls == {(p, s): count for p in PATTERNS for s, count in counts.items()}


BLOCKWISE_PLANS = [
    Plan("sequential"),
    Plan("pipelined"),
    Plan("pipelined", comm_rows=8),
    Plan("pipelined", splits=1),
    Plan("pipelined", splits=2),
]
# K of less than a block, of some, and of some and part of one; N too
BLOCKWISE_SHAPES = [(5, 16, 48), (13, 144, 256), (16, 32, 272)]
if DEVICE == "cuda":  # whose library takes no such rows, and not in all versions such K
    BLOCKWISE_SHAPES = [(8, 16, 512), (28, 144, 1024)]


def exact_blocks(rank: int, world_size: int) -> dict[tuple[str, str], int]:
    for number, (pattern, sizes, plan) in enumerate(
        itertools.product(PATTERNS, BLOCKWISE_SHAPES, BLOCKWISE_PLANS)
    ):
        x_dtype, bias = (E4M3, E5M2)[number % 2], pattern == "ag_gemm" and number % 2 == 0
        layer = Layer(pattern, sizes, x_dtype, OUT[2], world_size, bias=bias, blockwise=True)
        for step in range(3):  # one program, to which each call brings scales of its own
            layer.x_scale = [one.roll(step, 1) for one in layer.x_scale]
            expected = layer.expected()[rank]
            assert_exact(layer.call(plan), expected, f"{pattern} {sizes} {plan}")
    return flux_megatron.report().calls


@pytest.mark.parametrize("world_size", [2, 3])
def test_blockwise_scales_are_exact(world_size):
    """Each shard of x has its own, each row and 128 of K one; w one for 128 x 128."""
    steps = 3 * len(BLOCKWISE_SHAPES)
    counts = {"sequential": steps, "pipelined": 4 * steps}
    for calls in on_device(exact_blocks, world_size, world_size):
        assert calls == {(p, s): count for p in PATTERNS for s, count in counts.items()}


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


def calls_of_library(rank: int) -> int:
    taken = mock.Mock(side_effect=as_torch_takes_it)
    in_library = mock.patch.object(sequential, "_in_library", return_value=True)
    with mock.patch.object(torch, "_scaled_mm", taken), in_library:
        for pattern, plan in itertools.product(PATTERNS, BLOCKWISE_PLANS):
            layer = Layer(
                pattern, (12, 144, 512), E5M2, OUT[0], 2, bias=pattern == "ag_gemm", blockwise=True
            )
            assert_exact(layer.call(plan), layer.expected()[rank], f"{pattern} {plan}")
    return taken.call_count


@pytest.mark.skipif(DEVICE != "cpu", reason="stands in for CUDA")
def test_the_library_gets_scales_without_gaps():
    """One GEMM; one a shard, or a chunk of it; and bias is rounded with the sum."""
    gathering, reducing = 1 + 2 + 2 + 1 + 2, 1 + 2 + 4 + 1 + 1
    assert on_device(calls_of_library, 2) == [gathering + reducing] * 2


def close_calls(rank: int) -> None:
    for pattern, x_dtype, plan in itertools.product(PATTERNS, (E4M3, E5M2), PLANS):
        layer = Layer(pattern, (33, 32, 96), x_dtype, torch.float32, 2, drawn=spread)
        expected, got = layer.expected()[rank], layer.call(plan)
        wide = Layer(pattern, (33, 32, 96), x_dtype, torch.float32, 2, drawn=spread)
        wide.x, wide.w = [[one.double().abs() for one in part] for part in (wide.x, wide.w)]
        wide.out_dtype = torch.float64
        largest = wide.expected()[rank]  # sums of magnitudes, in whose last bits orders differ
        # tensor cores line products up by the largest of an MMA, and keep 13 bits below it
        step = 2.0**-13 if DEVICE == "cuda" else 2.0**-24
        assert ((got.cpu() - expected).abs() <= 96 * step * largest).all(), f"{pattern} {plan}"


def test_all_values_of_fp8_are_multiplied():
    on_device(close_calls, 2)


def every_result(rank: int) -> None:
    for pattern, plan, out_dtype in itertools.product(PATTERNS, PLANS, OUT):
        layer = Layer(pattern, (16, 16, 16), E4M3, out_dtype, 2)
        assert_exact(layer.call(plan), layer.expected()[rank], f"{pattern} {plan} {out_dtype}")
    for pattern, blockwise in itertools.product(PATTERNS, (False, True)):  # all with this sum
        sizes = (16, 16, 512)
        layer = Layer(pattern, sizes, E4M3, OUT[2], 2, blockwise=blockwise)
        got = layer.call(PLANS[-1], split_accumulator=True)
        assert_exact(got, layer.expected()[rank], f"{pattern} {blockwise}")


def test_one_shape_has_results_of_every_dtype():
    """What is kept for a shape, such as a launch, is not that of another result."""
    on_device(every_result, 2)


def gathered_bytes(rank: int) -> None:
    layer = Layer("ag_gemm", (16, 16, 16), E5M2, torch.bfloat16, 2)
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


def test_wgrad_borrows_the_gathered_bytes():
    on_device(gathered_bytes, 2)


def compiled_calls(rank: int) -> None:
    for pattern in PATTERNS:
        layer = Layer(pattern, (16, 16, 16), E4M3, torch.float16, 2)
        got = torch.compile(layer.call, backend="eager", fullgraph=True)(None)
        assert_exact(got, layer.expected()[rank])


def test_torch_compile_keeps_the_scales():
    on_device(compiled_calls, 2, environment={"FLUX_MEGATRON_STRATEGY": "fused"})


def bad_calls() -> dict[str, tuple[Callable, list[str]]]:
    """Calls of a group of 2, and what each message must contain."""
    group = dist.group.WORLD
    one = torch.ones(1, device=DEVICE)
    x, w = (torch.ones(16, 32, device=DEVICE).to(E4M3) for _ in range(2))
    scales = {"x_scale": one, "w_scale": one}
    gradient = w.to(E5M2)
    x_blocks, block = torch.ones(1, 16, device=DEVICE), torch.ones(1, 4, device=DEVICE)
    calls: dict[str, tuple[Callable, list[str]]] = {}
    for run in (ops.all_gather_gemm, ops.gemm_reduce_scatter):
        calls |= {
            f"{run.__name__}: {name}": (lambda run=run, a=given, o=options: run(*a, group, **o), it)
            for name, given, options, it in [
                ("no scales", (x, w), {}, ["without scales", "x_scale and w_scale"]),
                ("no scales, e5m2", (gradient, w), {}, ["without scales"]),
                ("no w_scale", (x, w), {"x_scale": one}, ["w_scale None given"]),
                ("no x_scale", (x, w), {"w_scale": one}, ["x_scale None given"]),
                ("out_dtype alone", (x, w), {"out_dtype": torch.float32}, ["x_scale None given"]),
                ("scales of bf16", (x.bfloat16(), w.bfloat16()), scales, ["x bfloat16 and w"]),
                ("w of e5m2", (x, gradient), scales, ["w float8_e5m2 given", "w float8_e4m3fn"]),
                ("w of bf16", (x, w.bfloat16()), scales, ["w bfloat16 given"]),
                ("a scale a row", (x, w), {**scales, "x_scale": torch.ones(16, device=DEVICE)},
                 ["x_scale [16] float32", "of one element on"]),
                ("a scale of bf16", (x, w), {**scales, "w_scale": one.bfloat16()},
                 ["w_scale [1] bfloat16"]),
                ("a scale elsewhere", (x, w), {**scales, "w_scale": one.to("meta")},
                 ["w_scale [1] float32 on meta given"]),
                ("a number", (x, w), {**scales, "w_scale": 1.0}, ["w_scale 1.0 given"]),
                ("out_dtype", (x, w), {**scales, "out_dtype": E4M3}, ["out_dtype torch.float8"]),
                ("layout", (x, w.t().contiguous()[:, :16]), {**scales, "layout": "nn"},
                 ["layout 'nn' given", "pass the cached transpose"]),
                ("K", (x[:, :24].clone(), w[:, :24].clone()), scales,
                 ["N 16 and K 24", "multiples of 16"]),
                ("N", (x, w[:8].clone()), scales, ["N 8 and K 32", "multiples of 16"]),
                ("blocks of x", (x, w), {"x_scale": x_blocks.new_ones(1, 20), "w_scale": block},
                 ["x_scale [1, 20] float32 on", "a float32 tensor [1, 16] on"]),
                ("blocks of w", (x, w), {"x_scale": x_blocks, "w_scale": block.new_ones(1, 2)},
                 ["w_scale [1, 2] float32 on", "a float32 tensor [1, 4] on"]),
                ("a block and a number", (x, w), {"x_scale": x_blocks, "w_scale": one},
                 ["x_scale [1, 16] float32", "of one element on"]),
                ("another strategy", (x, w), {**scales, "plan": Plan("signalled")},
                 ["cannot run", "dtype float8_e4m3fn is none of"]),
                ("our kernels", (x, w), {"x_scale": x_blocks, "w_scale": block,
                 "plan": Plan("fused")}, ["cannot run", "our kernels add up no products"]),
            ]
        }  # fmt: skip
    calls["bias"] = (
        lambda: ops.all_gather_gemm(x, w, group, **scales, bias=torch.ones(16, device=DEVICE)),
        ["bias [16] float32", "[16] torch.bfloat16 expected"],
    )
    calls["all-reduce"] = (lambda: ops.gemm_all_reduce(x, w, group), ["without scales"])
    calls["a call in pieces"] = (lambda: ops.start_gemm_rs(x, w, group), ["without scales"])
    return calls


def all_are_bad(rank: int) -> None:
    for pattern in PATTERNS:  # the shapes of most bad calls: what was checked is known by now
        Layer(pattern, (16 if pattern == "ag_gemm" else 8, 16, 32), E4M3, OUT[0], 2).call(None)
    for name, (bad, words) in bad_calls().items():
        with pytest.raises(ValueError, match=r"given|cannot run") as caught:
            bad()
        for word in words:
            assert word in str(caught.value), f"{name}: {word!r} is not in {caught.value}"
    layer = Layer("gemm_rs", (16, 16, 16), E4M3, torch.bfloat16, 2)
    assert_exact(layer.call(PLANS[1]), layer.expected()[rank])


def test_every_rank_refuses_misuse_and_the_group_still_works():
    on_device(all_are_bad, 2)


def other_result(rank: int) -> str:
    layer = Layer("gemm_rs", (16, 16, 16), E4M3, OUT[rank], 2)
    with pytest.raises(errors.ProblemMismatch) as caught:
        layer.call(None)
    return str(caught.value)


def test_ranks_with_other_results_are_told():
    for said in on_device(other_result, 2):
        assert "to bfloat16" in said
        assert "to float16" in said


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
