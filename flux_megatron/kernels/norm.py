"""LayerNorm and RMSNorm of rows, forward and backward: tensors as large as x are read once and
written once.

Forward: a CTA normalises a block of rows. Backward: as many CTAs as the device keeps resident share
the blocks. Each sums its rows of the weight's gradient in registers, and a second kernel sums these
partials in a fixed order, so the same operands give the same bits.

All arithmetic is fp32; a stored value is rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flux_megatron.kernels.launch import persistent_grid, supports_tensors
from flux_megatron.kernels.sizes import cdiv, next_power_of_2
from flux_megatron.kernels.triton_launch import launch_kernel
from flux_megatron.problem import Tile

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROW_BYTES_MAX = 65536


def supports(dtype: torch.dtype, weight: torch.dtype, N: int, is_cuda: bool) -> str | None:
    """Why the kernels cannot normalise rows of N elements in this process, or None."""
    dtypes = {dtype, weight}
    if not dtypes <= {*DTYPES}:
        return f"dtypes {dtypes} are not all of {DTYPES}"
    if N * dtype.itemsize > ROW_BYTES_MAX:
        return f"rows of {N} {dtype} take more than {ROW_BYTES_MAX} bytes"
    return supports_tensors("float32", "cuda" if is_cuda else "cpu")


@triton.jit
def _load_scale(weight, cols, N, ONE_PLUS: tl.constexpr):
    gamma = tl.load(weight + cols, mask=cols < N, other=0.0, eviction_policy="evict_last")
    gamma = gamma.to(tl.float32)[None, :]
    if ONE_PLUS:
        gamma += 1.0
    return gamma


# the number of rows changes from call to call and must not compile new kernels
@triton.jit(do_not_specialize=["M"])
def norm_forward_kernel(
    x, weight, bias, y, mean, rstd, M, x_stride, N,
    EPS: tl.constexpr, ONE_PLUS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """LayerNorm if `mean` is given, else RMSNorm."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    at = rows[:, None].to(tl.int64)
    values = tl.load(x + at * x_stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    if mean is not None:
        mean_of_row = tl.sum(values, 1) / N
        tl.store(mean + rows, mean_of_row, mask=rows < M)
        values = tl.where(inside, values - mean_of_row[:, None], 0.0)
    rstd_of_row = tl.rsqrt(tl.sum(values * values, 1) / N + EPS)
    tl.store(rstd + rows, rstd_of_row, mask=rows < M)
    result = values * rstd_of_row[:, None] * _load_scale(weight, cols, N, ONE_PLUS)
    if bias is not None:
        beta = tl.load(bias + cols, mask=cols < N, other=0.0, eviction_policy="evict_last")
        result += beta.to(tl.float32)[None, :]
    tl.store(y + at * N + cols[None, :], result.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def norm_backward_kernel(
    dy, x, weight, mean, rstd, dx, partials, M, x_stride, N,
    ONE_PLUS: tl.constexpr, BIAS: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """With n = (x - mean) rstd and g = dy gamma, over a row: dx = rstd (g - n mean(g n) - mean(g)),
    the last term for LayerNorm alone. partials [1 or 2, CTAs, N] are sums over the rows of each
    CTA: of dy n and, with BIAS, of dy.
    """
    cols = tl.arange(0, BLOCK_N)
    weight_partial = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    bias_partial = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    # wide rows need all registers: they load gamma from L1 for each row
    if STAGES > 1:
        gamma = _load_scale(weight, cols, N, ONE_PLUS)
    blocks = tl.cdiv(M, BLOCK_M)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = (rows[:, None] < M) & (cols[None, :] < N)
        at = rows[:, None].to(tl.int64)
        # the assembler spills least with the loads in this order
        rstd_of_row = tl.load(rstd + rows, mask=rows < M, other=0.0)[:, None]
        if mean is not None:
            mean_of_row = tl.load(mean + rows, mask=rows < M, other=0.0)[:, None]
        n = tl.load(x + at * x_stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        g = tl.load(dy + at * N + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        if STAGES == 1:
            gamma = _load_scale(weight, cols, N, ONE_PLUS)
        if mean is not None:
            n -= mean_of_row
        n *= rstd_of_row
        weight_partial += g * n
        if BIAS:
            bias_partial += g
        g *= gamma
        mean_gn = (tl.sum(g * n, 1) / N)[:, None]
        if mean is not None:
            mean_g = (tl.sum(g, 1) / N)[:, None]
        result = g - n * mean_gn
        if mean is not None:
            result -= mean_g
        result *= rstd_of_row
        tl.store(dx + at * N + cols[None, :], result.to(dx.dtype.element_ty), mask=inside)
    partials += tl.program_id(0) * N
    tl.store(partials + cols, tl.sum(weight_partial, 0), mask=cols < N)
    if BIAS:
        partials += tl.num_programs(0) * N
        tl.store(partials + cols, tl.sum(bias_partial, 0), mask=cols < N)


@triton.jit
def sum_partials_kernel(partials, total, ctas, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """partials [sums, CTAs, N] -> total [sums, N]."""
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    partials += tl.program_id(1) * ctas * N
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, ctas, BLOCK_M):
        rows = first + tl.arange(0, BLOCK_M)
        inside = (rows[:, None] < ctas) & (cols[None, :] < N)
        acc += tl.load(partials + rows[:, None] * N + cols[None, :], mask=inside, other=0.0)
    total += tl.program_id(1) * N
    tl.store(total + cols, tl.sum(acc, 0).to(total.dtype.element_ty), mask=cols < N)


def tile_of(N: int) -> Tile:
    """Blocks of at least 4096 elements, 16 a thread while a CTA's threads suffice."""
    block_n = next_power_of_2(N)
    block_m = max(1, 4096 // block_n)
    elements = block_m * block_n
    num_warps = 32 if elements > 16384 else min(elements // 512, 16)
    # one stage for wide rows: they have no registers for loads ahead
    return Tile(block_m, block_n, num_warps=num_warps, num_stages=1 if elements > 8192 else 2)


def norm_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, one_plus: bool, center: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """x [M, N], of any stride between rows -> y [M, N] in the dtype of `weight` [N], and for
    backward mean [M], with `center` (LayerNorm), and rstd [M].

    With `one_plus` gamma is 1 + weight.
    """
    M, N = x.shape
    y = x.new_empty((M, N), dtype=weight.dtype)
    rstd = x.new_empty(M, dtype=torch.float32)
    mean = torch.empty_like(rstd) if center else None
    tile = tile_of(N)
    launch_kernel(
        norm_forward_kernel, (cdiv(M, tile.block_m),), tile, (x, weight, bias, y, mean, rstd), (M,),
        (x.stride(0), N), EPS=eps, ONE_PLUS=one_plus,
    )  # fmt: skip
    return y, mean, rstd


def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, *,
    one_plus: bool, bias: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dy [M, N], contiguous -> dx [M, N] in the dtype of x, and the gradients of the parameters in
    theirs: [1, N] or, with `bias`, [2, N].
    """
    M, N = x.shape
    tile = tile_of(N)
    blocks = cdiv(M, tile.block_m)
    resident = max(1, 16 // tile.num_warps)  # CTAs on an SM, by its registers
    ctas = min(blocks, resident * persistent_grid(x.device, blocks)[0])
    dx = x.new_empty(M, N)
    partials = x.new_empty((2 if bias else 1, ctas, N), dtype=torch.float32)
    gradients = weight.new_empty(partials.shape[0], N)
    launch_kernel(
        norm_backward_kernel, (ctas,), tile, (dy, x, weight, mean, rstd, dx, partials), (M,),
        (x.stride(0), N), ONE_PLUS=one_plus, BIAS=bias, STAGES=tile.num_stages,
    )  # fmt: skip
    sum_partials(partials, gradients)
    return dx, gradients


def sum_partials(partials: Tensor, total: Tensor) -> None:
    """partials [sums, CTAs, N] -> total [sums, N]."""
    sums, ctas, N = partials.shape
    # on CPU few large blocks are cheaper than many
    block_n = next_power_of_2(N) if partials.device.type == "cpu" else 64
    tile = Tile(block_m=32, block_n=min(block_n, 8192), num_warps=4)
    launch_kernel(
        sum_partials_kernel, (cdiv(N, tile.block_n), sums), tile, (partials, total), sizes=(ctas, N)
    )
