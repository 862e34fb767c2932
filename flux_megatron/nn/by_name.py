"""The linear layers, of a group that is known by its name and its R ranks.

Modules keep these: a module that holds a group cannot be copied, and torch.compile cannot look a
group up.
"""

from __future__ import annotations

from torch import Tensor

from flux_megatron import ops
from flux_megatron.nn import all_reduced, functions, operators


def column_parallel_linear(x: Tensor, w: Tensor, bias: Tensor | None, name: str, R: int) -> Tensor:
    """`functions.column_parallel_linear`."""
    if ops.is_traced():
        return operators.linear("column", x, w, None, name, R, bias, False)[0]
    return functions.column_parallel_linear(x, w, bias, group=ops.group_named(name))


def row_parallel_linear(x: Tensor, w: Tensor, name: str, R: int) -> Tensor:
    """`functions.row_parallel_linear`."""
    if ops.is_traced():
        return operators.linear("row", x, w, None, name, R, None, False)[0]
    return functions.row_parallel_linear(x, w, group=ops.group_named(name))


def local_linear(x: Tensor, w: Tensor, bias: Tensor | None, name: str, R: int) -> Tensor:
    """`all_reduced.local_linear`; with the name "" dx stays this rank's partial sum."""
    if ops.is_traced():
        return operators.linear("local", x, w, None, name, R, bias, False)[0]
    group = ops.group_named(name) if name else None
    return all_reduced.local_linear(x, w, bias, allreduce_group=group)


def row_linear(x: Tensor, w: Tensor, name: str, R: int) -> Tensor:
    """`all_reduced.row_linear`."""
    if ops.is_traced():
        return operators.linear("whole", x, w, None, name, R, None, False)[0]
    return all_reduced.row_linear(x, w, group=ops.group_named(name))
