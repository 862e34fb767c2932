"""The cost model: close to what was measured on 4 x H200, and never absurd elsewhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flux_megatron.lab.perf.collectives import all_reduce_us, collective_us
from flux_megatron.lab.perf.gemm import gemm_us
from flux_megatron.lab.perf.hardware import A100, GPUS, H100, H200
from flux_megatron.lab.perf.linear import operator_us
from flux_megatron.lab.perf.operator_cost import gemms_us, moved_bytes
from flux_megatron.problem import Pattern, Problem

# Microseconds on 4 x H200, bf16, the GEMM's local M x N x K: the GEMM alone, then NCCL and GEMM,
# chunks of library GEMMs, one fused kernel.
MEASURED = {
    ("ag_gemm", 8192, 12288, 12288): (3024, 3526, 3080, 3104),
    ("ag_gemm", 8192, 9216, 12288): (2294, 2796, 2327, 2334),
    ("ag_gemm", 8192, 14336, 8192): (2394, 2740, 2421, 2444),
    ("ag_gemm", 4096, 12288, 12288): (1531, 1798, 1559, 1553),
    ("ag_gemm", 2048, 12288, 12288): (766, 911, 828, 784),
    ("ag_gemm", 1024, 12288, 12288): (387, 473, 440, None),
    ("gemm_rs", 8192, 12288, 12288): (3024, 3538, 3145, 3341),
    ("gemm_rs", 8192, 12288, 3072): (779, 1290, 889, 982),
    ("gemm_rs", 8192, 8192, 7168): (1227, 1578, 1270, 1367),
    ("gemm_rs", 4096, 12288, 12288): (1527, 1798, 1581, 1694),
    ("gemm_rs", 2048, 12288, 12288): (766, 911, 846, 869),
    ("gemm_rs", 1024, 12288, 12288): (386, 468, 450, 437),
}
STRATEGIES = ("megatron", "pipelined", "fused", "hopper")
SIZES = st.sampled_from([64, 192, 512, 1024, 3072, 8192, 12288])


def problem(pattern: str, M: int, N: int, K: int, layout: str = "nt") -> Problem:
    """Of four ranks, by the local sizes."""
    gathers = pattern == "ag_gemm"
    N, K = N * (4 if gathers else 1), K * (1 if gathers else 4)
    return Problem(Pattern(pattern), M, N, K, "bfloat16", 4, layout)


@pytest.mark.parametrize("shape", MEASURED, ids=lambda shape: "x".join(map(str, shape)))
def test_within_15_percent_of_what_was_measured(shape):
    gemm, *times = MEASURED[shape]
    assert gemm_us(H200, *shape[1:], "bfloat16") == pytest.approx(gemm, rel=0.15)
    for strategy, measured in zip(STRATEGIES[:3], times, strict=True):
        if measured is not None:
            predicted = operator_us(problem(*shape), strategy, H200)
            assert predicted == pytest.approx(measured, rel=0.15), strategy


def test_the_backward_of_stock_layers():
    """Forward and backward of one layer as Megatron-core runs it, by its own measurement."""
    pair = ("ag_gemm", "gemm_rs")
    for forward, backward, N, K, measured in [
        (*pair, 12288, 12288, 10093), (*pair, 9216, 12288, 7759), (*pair[::-1], 12288, 3072, 3345)
    ]:  # fmt: skip
        halves = problem(forward, 8192, N, K), problem(backward, 8192, K, N, "nn")
        both = sum(operator_us(half, "megatron", H200) for half in halves)
        assert both == pytest.approx(measured, rel=0.05)


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


def test_small_problems_are_not_cut_into_library_gemms():
    """Each of four GEMMs would read the whole weight."""
    small, large = (problem("ag_gemm", M, 12288, 12288) for M in (64, 8192))
    assert operator_us(small, "megatron", H200) < operator_us(small, "pipelined", H200)
    assert operator_us(large, "megatron", H200) > operator_us(large, "pipelined", H200)
    # what is exposed is the collective where nothing overlaps
    collective = collective_us(H200, moved_bytes(large), 4)
    gemms = sum(gemms_us(large, H200))
    assert operator_us(large, "megatron", H200) - gemms == pytest.approx(collective)
    assert 0.0 <= operator_us(large, "hopper", H200) - gemms < 0.2 * collective


def test_all_reduces_of_few_rows():
    """mm and its all-reduce in decoding, of `gemv_ar.jsonl`."""
    for M, N, K, us in (1, 8192, 8192, 27.6), (16, 8192, 8192, 29.5), (16, 12288, 49152, 162.8):
        problem = Problem(Pattern.GEMM_AR, M, N, K, "bfloat16", 2)
        assert operator_us(problem, "megatron", H200) == pytest.approx(us, rel=0.15)
