"""What layers of experts keep: whole buffers of the last ones, copies of the rows of others."""

from __future__ import annotations

import torch
from closeness import assert_exact
from ranks import DEVICE, on_device_ranks

from flux_megatron.expert_parallel import kept_rows
from flux_megatron.expert_parallel.kept_rows import Kept

CAPACITY, COLUMNS = 64, 8
CAME = [3, 11, 19, 27, 35]  # rows of each layer


class Sum(torch.autograd.Function):
    """The sum of the first rows of x [CAPACITY, COLUMNS] times w; others are undefined."""

    @staticmethod
    def forward(ctx, w: torch.Tensor, x: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.rows = rows
        return w * x[:rows].sum(0)

    @staticmethod
    def backward(ctx, dy: torch.Tensor):
        (x,) = ctx.saved_tensors
        assert len(x) == CAPACITY
        return dy * x[: ctx.rows].sum(0), None, None


def forward(on_average: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[Kept]]:
    """The layers' results and weights, and what each keeps."""
    made = torch.Generator(DEVICE).manual_seed(1)
    ys, weights, kept = [], [], []
    for rows in CAME:
        received = torch.tensor([[rows - 3, 3, 0]], dtype=torch.int32, device=DEVICE)
        x = torch.randn(CAPACITY, COLUMNS, generator=made, device=DEVICE)
        x[rows:] = float("nan")  # undefined
        weights.append(torch.ones(COLUMNS, device=DEVICE, requires_grad=True))
        with kept_rows.keeping(CAPACITY, on_average, 3, x.device) as one:
            ys.append(Sum.apply(weights[-1], x, rows))
            one.counted(received)
        kept.append(one)
    return ys, weights, kept


def sizes(kept: list[Kept]) -> list[set[int]]:
    return [{len(packed.tensor) for packed in one.packed} for one in kept]


@on_device_ranks(1)
def test_layers_before_the_last_ones_keep_what_came(rank):
    few, many = CAPACITY // kept_rows.TIMES - 1, CAPACITY // kept_rows.TIMES
    ys, weights, kept = forward(on_average=few)
    settled = len(CAME) - kept_rows.MOST
    assert sizes(kept)[:settled] == [{rows} for rows in CAME[:settled]]
    assert sizes(kept)[-1] == {CAPACITY}
    plain, others, whole = forward(on_average=many)
    assert sizes(whole) == [set()] * len(CAME), "all is kept as it is"
    for y, weight, its, other in reversed([*zip(ys, weights, plain, others, strict=True)]):
        (found,), (right,) = (
            torch.autograd.grad(y.sum(), weight),
            torch.autograd.grad(its.sum(), other),
        )
        assert_exact(found, right)
    del y, its
    ys.clear()
    assert sizes(kept) == [set()] * len(CAME), "autograd has let go"
