"""Linear layers of integers on all ranks, with the reference and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from closeness import assert_exact, assert_sums_exact, small_integers
from ranks import DEVICE, here
from torch import Tensor

from flux_megatron.lab import reference
from flux_megatron.nn.functions import column_parallel_linear, local_linear, row_parallel_linear
from flux_megatron.symm.workspaces import workspace


@dataclass(frozen=True)
class Layer:
    """One layer on all ranks: integer operands, and the reference with its gradients in fp64."""

    kind: str
    dtype: torch.dtype
    x: list[Tensor]
    w: list[Tensor]
    bias: list[Tensor] | None
    dy: list[Tensor]
    y: list[Tensor] = field(default_factory=list)
    dx: list[Tensor] = field(default_factory=list)
    dw: list[Tensor] = field(default_factory=list)
    db: list[Tensor] = field(default_factory=list)


def layer(
    kind: str, world_size: int, dtype: torch.dtype,
    rows: tuple[int, ...], N: int, K: int, bias: bool, kept: float = 1.0,
) -> Layer:  # fmt: skip
    """x, w, bias, dy and the results, as lists over ranks; the same on every rank that asks. Of all
    numbers but the share `kept` are 0.
    """
    generator = torch.Generator().manual_seed(N * K + len(rows))

    def shards(*shape: int) -> list[Tensor]:
        return [small_integers(shape, dtype, generator, kept=kept) for _ in range(world_size)]

    whole = (world_size * rows[0], *rows[1:])
    x = shards(*(whole if kind == "row" else rows), K)
    w = shards(N, K)
    b = shards(N) if bias and kind != "row" else None
    dy = shards(*(whole if kind == "column" else rows), N)
    made = Layer(kind, dtype, x, w, b, dy)
    solve(made)
    return made


def solve(made: Layer) -> None:
    """The reference and its gradients by autograd; asserts that every sum in them is exact."""
    x, w, dy = (
        [t.double().requires_grad_() for t in shards] for shards in (made.x, made.w, made.dy)
    )
    b = [t.double().requires_grad_() for t in made.bias or []]
    if made.kind == "column":
        y = reference.all_gather_gemm(x, w, bias=b or None)
        assert_layer_exact(torch.cat(made.x), torch.cat(made.w), torch.cat(made.dy, -1))
    elif made.kind == "row":
        y = reference.gemm_reduce_scatter(x, w)
        assert_layer_exact(torch.cat(made.x, -1), torch.cat(made.w, 1), torch.cat(made.dy))
    else:
        y = [reference.matmul(x[r], w[r]) + (b[r] if b else 0) for r in range(len(x))]
        for one in zip(made.x, made.w, made.dy, strict=True):
            assert_layer_exact(*one)
    torch.autograd.backward(y, [t.detach() for t in dy])
    made.y.extend(t.detach().to(made.dtype) for t in y)
    made.dx.extend(t.grad.to(made.dtype) for t in x)
    made.dw.extend(t.grad.to(made.dtype) for t in w)
    made.db.extend(t.grad.to(made.dtype) for t in b)


def assert_layer_exact(x: Tensor, w: Tensor, dy: Tensor) -> None:
    """No sum of forward or backward leaves the exact integers: y, db, dx, dw."""
    x, dy = x.flatten(0, -2), dy.flatten(0, -2)
    assert_sums_exact(x, w.t(), extra=1)
    assert_sums_exact(torch.ones(1, len(dy), dtype=dy.dtype), dy)
    assert_sums_exact(dy, w)
    assert_sums_exact(dy.t(), x)


def apply(made: Layer, x: Tensor, w: Tensor, bias: Tensor | None, **options) -> Tensor:
    if made.kind == "column":
        return column_parallel_linear(x, w, bias, group=dist.group.WORLD, **options)
    if made.kind == "row":
        return row_parallel_linear(x, w, group=dist.group.WORLD, **options)
    return local_linear(x, w, bias, **options)


def mine(made: Layer, rank: int, needs: str = "xwb") -> list[Tensor | None]:
    """This rank's x, w, bias; those named in `needs` want gradients."""
    given = [made.x[rank], made.w[rank], made.bias[rank] if made.bias else None]
    return [
        None if t is None else t.clone().to(DEVICE).requires_grad_(name in needs)
        for name, t in zip("xwb", given, strict=True)
    ]


def check(made: Layer, rank: int, needs: str = "xwb", **options) -> None:
    """Forward and backward of this rank: gradients are exact where wanted, else None."""
    x, w, bias = mine(made, rank, needs)
    what = f"{made.kind} {made.dtype} {list(x.shape)} x {list(w.shape)} {needs} {options}"
    y = apply(made, x, w, bias, **options)
    assert_exact(y, made.y[rank], f"y of {what}")
    if not y.requires_grad:
        assert not needs, what
        return
    y.backward(made.dy[rank].to(DEVICE))
    for name, tensor, expected in (("x", x, made.dx), ("w", w, made.dw), ("b", bias, made.db)):
        if tensor is None:
            continue
        if name in needs:
            assert_exact(tensor.grad, expected[rank], f"d{name} of {what}")
        else:
            assert tensor.grad is None, f"d{name} of {what}"


def epochs() -> tuple[int, int]:
    space = workspace(dist.group.WORLD, here())
    return space.channels["gather"].epoch, space.channels["scatter"].epoch


def transfers(work: Callable[[], object]) -> tuple[int, int]:
    """How many gathers and scatters `work` makes."""
    before = epochs()
    work()
    return tuple(after - b for after, b in zip(epochs(), before, strict=True))
