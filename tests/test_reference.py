"""The reference, against the unsharded product in fp64 and against loops written out."""

import pytest
import torch
from closeness import EXACT_LIMIT, assert_exact, assert_sums_exact, small_integers

from flux_megatron.lab import reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
WORLD_SIZES = [1, 2, 3, 4, 8]
M_SHARD, N, K = 5, 7, 3


def shards(R: int, *shape: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [small_integers(shape, dtype, generator, largest=2) for _ in range(R)]


@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("R", WORLD_SIZES)
def test_all_gather_gemm(R, dtype, layout):
    x = shards(R, M_SHARD, K, dtype=dtype, seed=1)
    w = shards(R, *((N, K) if layout == "nt" else (K, N)), dtype=dtype, seed=2)
    bias = shards(R, N, dtype=dtype, seed=3)
    whole_w = torch.cat([t if layout == "nt" else t.t() for t in w]).double()
    whole = torch.cat(x).double() @ whole_w.t() + torch.cat(bias).double()
    with_bias, without = (reference.all_gather_gemm(x, w, layout, b) for b in (bias, None))
    for r, expected in enumerate(whole.to(dtype).chunk(R, 1)):
        assert_exact(with_bias[r], expected)
        assert_exact(without[r] + bias[r], expected)


@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("R", WORLD_SIZES)
def test_gemm_reduce_scatter_and_all_reduce(R, dtype, layout):
    M = R * M_SHARD
    x = shards(R, M, K, dtype=dtype, seed=1)
    w = shards(R, *((N, K) if layout == "nt" else (K, N)), dtype=dtype, seed=2)
    columns = [t.t() if layout == "nt" else t for t in w]
    assert_sums_exact(torch.cat(x, 1), torch.cat(columns))
    whole = (torch.cat(x, 1).double() @ torch.cat(columns).double()).to(dtype)
    scattered = reference.gemm_reduce_scatter(x, w, layout)
    for y, expected in zip(scattered, whole.chunk(R), strict=True):
        assert_exact(y, expected)
    reduced = reference.gemm_all_reduce(x, w, layout)
    for y in reduced:
        assert_exact(y, whole)
    assert len({y.data_ptr() for y in reduced}) == R


def test_each_partial_result_is_rounded_before_the_sum_which_is_wide():
    limit = EXACT_LIMIT[torch.bfloat16]
    ones, large = torch.ones(2, 1).bfloat16(), torch.tensor([[float(limit)]]).bfloat16()
    x = [torch.cat([ones, ones], 1), torch.cat([ones, ones], 1)]
    w = [torch.cat([large, ones[:1]], 1), torch.cat([-large, ones[:1]], 1)]
    # 256 + 1 rounds to 256, -256 + 1 is exact: the sum of the rounded is -255 + 256, not 2
    assert reference.gemm_reduce_scatter(x, w)[0].item() == 1.0
    # in bf16 256 + 1 + 1 stays at 256
    x = [torch.ones(3, 1).bfloat16() for _ in range(3)]
    w = [torch.tensor([[value]]).bfloat16() for value in (256.0, 1.0, 1.0)]
    assert reference.gemm_reduce_scatter(x, w)[0].item() == 258.0
    # float64 stays float64
    x, w = torch.full((1, 1), 1 + 2**-40, dtype=torch.float64), torch.ones(1, 1).double()
    assert reference.matmul(x, w).item() == 1 + 2**-40
    assert reference.matmul(x.bfloat16(), w.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_embedding_all_to_all(mode, dtype):
    """Beside torch's lookup of each table: two tables of one rank, one of the other."""
    weight = [shards(1, n, 5, 3, dtype=dtype, seed=n)[0] for n in (2, 1)]
    offsets = [torch.tensor([0, 2, 2, 3, 3, 4, 6, 6, 8]), torch.tensor([0, 0, 1, 3, 4])]
    indices = [torch.tensor([4, 0, 1, 1, 3, 2, 0, 0]), torch.tensor([2, 4, 4, 0])]
    y = reference.embedding_all_to_all(weight, indices, offsets, mode)
    tables = [(weight[0][0], 0, 0), (weight[0][1], 0, 4), (weight[1][0], 1, 0)]
    for sample in range(4):
        got = y[sample // 2][sample % 2]
        for table, (rows, r, first) in enumerate(tables):
            begin, end = offsets[r][first + sample : first + sample + 2].tolist()
            bag = rows[indices[r][begin:end]].double()
            pooled = bag.sum(0) / (max(end - begin, 1) if mode == "mean" else 1)
            assert_exact(got[table], pooled.to(dtype), f"sample {sample} table {table}")
