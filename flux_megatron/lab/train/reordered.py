"""Stock Megatron with its sequence-parallel sums in another order: a baseline for low precision.

Two correct implementations that add the same partial sums in different orders drift apart in
bfloat16. How far stock Megatron drifts from itself bounds the drift of another correct one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, reduce

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers, mappings

ORDERS: dict[str, Callable[[list[torch.Tensor]], torch.Tensor]] = {
    "stock-rank-order": lambda partials: reduce(torch.add, [part.float() for part in partials]),
    "stock-reverse-order": lambda partials: reduce(torch.add, reversed(partials)),
}


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


class _Finished:
    """The handle of a collective that is already complete."""

    def wait(self) -> None: ...


def _reduce_scatter(
    add_up: Callable[[list[torch.Tensor]], torch.Tensor], output: torch.Tensor,
    input_: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False,
) -> _Finished | None:  # fmt: skip
    received = torch.empty_like(input_)
    dist.all_to_all_single(received, input_, group=group)
    output.copy_(add_up([*received.chunk(group.size())]))
    return _Finished() if async_op else None
