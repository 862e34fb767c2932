"""What the Hopper kernels share: a ring of stages from the warp that loads to those that multiply.

The loading warp runs ahead: it waits until a stage is `free`, loads the operands of one step of K
into it by TMA, and `ready` completes when they are there. Two warp groups multiply: each wgmma
reads its stage while the one before finishes. Waits for other ranks happen in warps that do not
multiply, so they cost the tensor cores nothing until data is really late.

Which tile a CTA makes next is in `hopper_scheduler`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from flux_megatron.kernels.hopper_primitives import (
    barrier,
    begin_draw,
    count_release_sys,
    wait_acquire_sys,
)

DRAW_AHEAD = gl.constexpr(4)  # k-tiles before the last: 16 were no faster (tile_order.jsonl)


@gluon.jit
def tile_in_groups(tile, tiles_m, tiles_n, group_m):
    """Row and column, in tiles: `group_m` rows of tiles go column by column, to reuse w in L2."""
    per_group = group_m * tiles_n
    first = tile // per_group * group_m
    rows = min(tiles_m - first, group_m)
    within = tile % per_group
    return first + within % rows, within // rows


@gluon.jit
def number_in_groups(m, n, tiles_m, tiles_n, group_m):
    """The inverse of `tile_in_groups`."""
    first = m // group_m * group_m
    rows = min(tiles_m - first, group_m)
    return first * tiles_n + n * rows + m - first


@gluon.jit
def leave_part(out, partials, counters, cut, part, parts_max: gl.constexpr, layout: gl.constexpr):
    """Leave the sum over a part of K, other than the first, to the program that has the first."""
    BM: gl.constexpr = out.shape[0]
    BN: gl.constexpr = out.shape[1]
    offsets = offsets_in_tile(BM, BN, layout)
    place = (cut * (parts_max - 1) + part - 1).to(gl.int64)
    gl.store(partials + place * (BM * BN) + offsets, out)
    barrier()
    count_release_sys(counters + cut)  # flag [F]


@gluon.jit
def join_parts(
    out, partials, counters, cut, parts, deadline, status,
    parts_max: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Add the other parts of K, in their order, when they are there.

    This ends, because what it waits for comes earlier in the order of items; the deadline is for
    the case that another program has died.
    """
    BM: gl.constexpr = out.shape[0]
    BN: gl.constexpr = out.shape[1]
    wait_acquire_sys(counters, cut, parts - 1, deadline, status)  # wait [F]
    gl.store(counters + cut, 0)  # for the next launch
    offsets = offsets_in_tile(BM, BN, layout)
    for part in range(parts - 1):
        place = (cut * (parts_max - 1) + part).to(gl.int64)
        out += gl.load(partials + place * (BM * BN) + offsets)
    return out


@gluon.jit
def offsets_in_tile(BM: gl.constexpr, BN: gl.constexpr, layout: gl.constexpr):
    rows = gl.arange(0, BM, gl.SliceLayout(1, layout))
    cols = gl.arange(0, BN, gl.SliceLayout(0, layout))
    return rows[:, None] * BN + cols[None, :]


@gluon.jit
def load_steps(
    x_desc, w_desc, row, col, first, last, x_bufs, w_bufs, ready, free, loaded,
    LAYOUT_NN: gl.constexpr,
):  # fmt: skip
    """Load steps `first` to `last` of the tile at (row, col), each as its stage becomes free.

    `loaded` counts the steps of this program so far; gives the new count.
    """
    STAGES: gl.constexpr = x_bufs.shape[0]
    BK: gl.constexpr = x_desc.block_type.shape[1]
    for step in range(first, last):
        stage = loaded % STAGES
        bar = ready.index(stage)
        mbarrier.wait(free.index(stage), (loaded // STAGES & 1) ^ 1)
        mbarrier.expect(bar, x_desc.block_type.nbytes + w_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(x_desc, [row, step * BK], bar, x_bufs.index(stage))
        if LAYOUT_NN:
            tma.async_copy_global_to_shared(w_desc, [step * BK, col], bar, w_bufs.index(stage))
        else:
            tma.async_copy_global_to_shared(w_desc, [col, step * BK], bar, w_bufs.index(stage))
        loaded += 1
    return loaded


@gluon.jit
def load_tile(
    x_desc, w_desc, row, col, first, last, x_bufs, w_bufs, ready, free, loaded, work_counter,
    LAYOUT_NN: gl.constexpr,
):  # fmt: skip
    """`load_steps`, and the draw of the next item before the last of them; gives its ticket too."""
    lead = max(first, last - DRAW_AHEAD)
    loaded = load_steps(
        x_desc, w_desc, row, col, first, lead, x_bufs, w_bufs, ready, free, loaded, LAYOUT_NN
    )
    ticket = begin_draw(work_counter)
    loaded = load_steps(
        x_desc, w_desc, row, col, lead, last, x_bufs, w_bufs, ready, free, loaded, LAYOUT_NN
    )
    return loaded, ticket


@gluon.jit
def multiply_step(acc, x_bufs, w_bufs, ready, free, multiplied, first, LAYOUT_NN: gl.constexpr):
    """acc += the next step, issued; the product before it is done, and its stage given back.

    `first`: there is no product before it in flight.
    """
    STAGES: gl.constexpr = x_bufs.shape[0]
    stage = multiplied % STAGES
    mbarrier.wait(ready.index(stage), multiplied // STAGES & 1)
    w_buf = w_bufs.index(stage)
    if LAYOUT_NN:
        acc = warpgroup_mma(x_bufs.index(stage), w_buf, acc, is_async=True)
    else:
        acc = warpgroup_mma(x_bufs.index(stage), w_buf.permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
    before = (multiplied + STAGES - 1) % STAGES
    mbarrier.arrive(free.index(before), count=1, pred=not first)
    return acc


@gluon.jit
def finish_products(acc, free, multiplied):
    """The accumulator as a tensor, when all its products are done; the last stage is given back."""
    STAGES: gl.constexpr = free.shape[0]
    out = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(free.index((multiplied + STAGES - 1) % STAGES), count=1)
    return out
