"""Stock Megatron with its sequence-parallel sums in another order: a baseline for low precision.

Two correct implementations that add the same partial sums in different orders drift apart in
bfloat16. How far stock Megatron drifts from itself bounds the drift of another correct one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers, mappings


@contextmanager
def reordered_reduce_scatter(order: str) -> Iterator[None]:
    """Within, Megatron's reduce-scatters are an all-to-all and a local sum in `order`, a name of
    `ORDERS`.
    """
    originals = {module: module.dist_reduce_scatter_func for module in (layers, mappings)}
    for module in originals:
        module.dist_reduce_scatter_func = partial(_reduce_scatter, ORDERS[order])
    try:
        yield
    finally:
        for module, original in originals.items():
            module.dist_reduce_scatter_func = original


def _rank_order_fp32(partials: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros_like(partials[0], dtype=torch.float32)
    for partial_sum in partials:
        total += partial_sum
    return total


def _reverse_order(partials: list[torch.Tensor]) -> torch.Tensor:
    total = partials[-1].clone()
    for partial_sum in reversed(partials[:-1]):
        total += partial_sum
    return total


ORDERS = {"stock-rank-order": _rank_order_fp32, "stock-reverse-order": _reverse_order}


class _Finished:
    """The handle of a collective that is already complete."""

    def wait(self) -> None:
        return None


def _reduce_scatter(
    add_up: Callable[[list[torch.Tensor]], torch.Tensor],
    output: torch.Tensor,
    input_: torch.Tensor,
    group: dist.ProcessGroup,
    async_op: bool = False,
) -> _Finished | None:
    received = torch.empty_like(input_)
    dist.all_to_all_single(received, input_, group=group)
    output.copy_(add_up(list(received.chunk(group.size()))))
    return _Finished() if async_op else None
