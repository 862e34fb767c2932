"""The cost model of single operations: never absurd, wherever nobody measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flux_megatron.lab.perf.collectives import all_reduce_us, collective_us
from flux_megatron.lab.perf.gemm import gemm_us
from flux_megatron.lab.perf.hardware import A100, GPUS, H100, H200
from flux_megatron.lab.perf.linear import operator_us
from flux_megatron.problem import Pattern, Problem

STRATEGIES = ("megatron", "pipelined", "fused", "hopper")
SIZES = st.sampled_from([64, 192, 512, 1024, 3072, 8192, 12288])


def problem(pattern: str, M: int, N: int, K: int, layout: str = "nt") -> Problem:
    """Of four ranks, by the local sizes."""
    gathers = pattern == "ag_gemm"
    N, K = N * (4 if gathers else 1), K * (1 if gathers else 4)
    return Problem(Pattern(pattern), M, N, K, "bfloat16", 4, layout)


@pytest.mark.parametrize(
    ("mebibytes", "half_us", "all_reduce"), [(8, 48, 62), (64, 189, 324), (192, 501, 901)]
)
def test_collectives(mebibytes, half_us, all_reduce):
    assert collective_us(H200, mebibytes * 2**20, 4) == pytest.approx(half_us, rel=0.15)
    assert all_reduce_us(H200, mebibytes * 2**20, 4) == pytest.approx(all_reduce, rel=0.15)


@given(SIZES, SIZES, SIZES, st.sampled_from(GPUS))
def test_a_larger_gemm_never_takes_less(M, N, K, gpu):
    one = gemm_us(gpu, M, N, K, "bfloat16")
    assert one > 2e-6 * M * N * K / gpu.tflops["bfloat16"]
    for larger in [(2 * M, N, K), (M, 2 * N, K), (M, N, 2 * K)]:
        assert gemm_us(gpu, *larger, "bfloat16") >= one


@given(
    st.sampled_from(["ag_gemm", "gemm_rs"]), SIZES, SIZES, SIZES,
    st.sampled_from(["nt", "nn"]), st.sampled_from(STRATEGIES),
)  # fmt: skip
def test_a_larger_problem_never_takes_less_and_hiding_gains_no_more_than_there_is(
    pattern, M, N, K, layout, strategy
):
    now, twice = (problem(pattern, rows, N, K, layout) for rows in (M, 2 * M))
    assert operator_us(twice, strategy, H200) >= operator_us(now, strategy, H200)
    assert operator_us(now, strategy, H200) >= gemm_us(H200, M, N, K, "bfloat16") - H200.launch_us
    assert operator_us(now, strategy, A100) > operator_us(now, strategy, H100) * 0.99


def test_all_reduces_of_few_rows():
    """mm and its all-reduce in decoding, of `gemv_ar.jsonl`."""
    for M, N, K, us in (1, 8192, 8192, 27.6), (16, 8192, 8192, 29.5), (16, 12288, 49152, 162.8):
        problem = Problem(Pattern.GEMM_AR, M, N, K, "bfloat16", 2)
        assert operator_us(problem, "megatron", H200) == pytest.approx(us, rel=0.15)
