"""Stock Megatron with its sequence-parallel sums in another order: a yardstick for low precision.

Two correct programs that add the same partial results in different orders drift apart in bfloat16.
How far stock Megatron drifts from itself says how far another correct implementation may drift.
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


def _rank_order_fp32(parts: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part
    return total


def _reverse_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[-1].clone()
    for part in reversed(parts[:-1]):
        total += part
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
